"""How each field of each endpoint's body is treated. Bodies are parsed by these tables, and docs/api.md is generated
from them."""
