def set_memory_pool(*a):
    pass
