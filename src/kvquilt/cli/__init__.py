"""The `kvquilt` command."""
