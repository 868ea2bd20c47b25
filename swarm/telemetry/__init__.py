"""Telemetry of nodes: metrics, signed reports over MQTT, and the web page."""
