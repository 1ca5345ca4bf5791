"""A short soak: nothing grows over loads of two towers, one in four of which fails. The long one is a benchmark."""

from benchmarks import soak
from tests.ranks import run_on_ranks


def test_nothing_grows(tmp_path):
    towers = soak.make_towers(tmp_path)
    largest_bytes = max((tower / "model.safetensors").stat().st_size for tower in towers.values())
    results = run_on_ranks(2, soak.soak, towers, soak.WARM_UP + 20, store="tcp", timeout_s=110)
    for result in results:
        assert result.ok, result.describe()
        assert {each["outcome"] for each in result.value} >= {"loaded", "IntegrityError", "SourceError"}
        verdicts = soak.judge(result.value)
        memory = verdicts.pop("memory_bytes")
        assert all(row["level"] for row in verdicts.values()), verdicts
        # The halves are ten loads apart: a tower kept by each would be ten. The allocator keeps one at times, once.
        assert memory["second"] - memory["first"] < 2 * largest_bytes, memory
