"""The commands of `shoal`: declaration, flags and printing. The work is done in the other packages."""
