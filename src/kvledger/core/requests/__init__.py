"""A request, its tokens and the hashes of its blocks."""
