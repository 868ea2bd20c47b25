"""What nodes tell those who watch, by MQTT and on a page."""
