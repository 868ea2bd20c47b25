"""Who is out there, where, and whether to talk to them."""
