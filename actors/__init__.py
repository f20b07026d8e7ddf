"""What runs beside the device: replica, training session, process groups, reduction, state transfer, data."""
