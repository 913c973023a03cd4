"""Programs of a checkout; a package, so that none of the same name elsewhere is imported instead."""
