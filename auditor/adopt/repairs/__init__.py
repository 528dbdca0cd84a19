"""What rules about integration and consistency (PA303 to PA305, PA401 to PA405) offer as fixes."""
