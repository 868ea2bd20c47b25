"""The methods of a round's stages."""
