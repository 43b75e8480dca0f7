"""`ddpcheck hang`: cause of a hang, by Flight Recorder dumps or a debug server."""
