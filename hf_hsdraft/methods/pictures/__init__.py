"""Pictures of training runs and measurements, by matplotlib."""
