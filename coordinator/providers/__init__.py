"""Providers: the sources of workers."""
