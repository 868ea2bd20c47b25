"""A run as a page of figures and plots."""
