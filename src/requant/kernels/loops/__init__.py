"""The kernels' loops as numba compiles them: imported only where one has yet to be compiled."""
