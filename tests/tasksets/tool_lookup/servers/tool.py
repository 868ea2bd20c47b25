"""Tool server with read access to the parts catalog."""

import verifiers.v1 as vf
from pydantic import Field

from tool_lookup.catalog import Part, build_catalog


class CatalogToolsetConfig(vf.ToolsetConfig):
    """Which catalog to serve, and where the server runs."""

    catalog_seed: int = 0
    """Seed of the invented catalog."""
    catalog_size: int = Field(60, ge=1, le=1000)
    """Number of parts in the catalog."""


class CatalogToolset(vf.Toolset[CatalogToolsetConfig]):
    """Looks up parts by code or by shelf."""

    TOOL_PREFIX = "catalog"

    async def setup(self) -> None:
        parts = build_catalog(self.config.catalog_seed, self.config.catalog_size)
        self.parts: dict[str, Part] = {part.code: part for part in parts}

    @vf.tool
    def get_part(self, code: str) -> str:
        """Return name, shelf, stock and price of the part with this code."""
        part = self.parts.get(code.strip().upper())
        if part is None:
            return f"No part has the code {code!r}."
        return part.model_dump_json()

    @vf.tool
    def list_shelf(self, shelf: str) -> list[str]:
        """Return the codes of all parts on this shelf."""
        return [p.code for p in self.parts.values() if p.shelf == shelf.strip().upper()]


if __name__ == "__main__":
    CatalogToolset.run()
