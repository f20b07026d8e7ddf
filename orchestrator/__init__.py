"""What the user calls and what decides: public API, configs, controller, events, CLI."""
