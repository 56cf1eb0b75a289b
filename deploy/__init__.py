"""Ways to run Prism: `local` on one machine for a person at a terminal; the others are files for their own tools."""
