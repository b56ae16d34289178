"""Planning: everything that headers can decide, before a byte of data is read."""
