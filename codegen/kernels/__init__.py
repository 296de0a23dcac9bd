"""The kernels of every target, as the compiler knows them."""
