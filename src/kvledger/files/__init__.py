"""Files from outside: read with bounds, decoded with errors that name the place. Whatever is in one, nothing else is
raised than the library's own errors."""
