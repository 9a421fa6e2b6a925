"""The faults that `benchmarks/mutants/run.py` tries fit the code, so that no run of them starts in vain."""

import pytest

from benchmarks.mutants.run import HERE, ROOT, read_table


@pytest.mark.parametrize("package", sorted(path.stem for path in (HERE / "tables").glob("*.toml")))
def test_each_fault_is_at_one_place_and_its_tests_are_there(package):
    for mutant in read_table(package):
        assert mutant.misfit(ROOT) is None
        for test in mutant.tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).exists(), test
            assert not name or name.partition("[")[0].rpartition("::")[2] in (ROOT / path).read_text(), test
