"""Between two steps of SGLang's event loop: commands, pauses, reclaims and retractions."""
