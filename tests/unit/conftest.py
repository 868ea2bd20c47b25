from tests.unit.verifier_trap import trap  # noqa: F401  a fixture
