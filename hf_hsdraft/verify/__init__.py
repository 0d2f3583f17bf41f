"""Which path of a draft tree is accepted, and by which random numbers."""
