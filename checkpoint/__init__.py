"""What makes state durable: state trees, slices and hashes. Knows neither Ray nor the network."""
