"""JSON schemas and answers, drawn, and judges of them."""
