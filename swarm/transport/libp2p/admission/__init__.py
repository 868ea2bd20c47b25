"""From a socket to an admitted connection: the only way in, and the only way out."""
