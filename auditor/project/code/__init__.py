"""The code as such: modules, classes, types, and which function a call reaches."""
