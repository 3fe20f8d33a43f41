"""Many launches of a two-process script in a row: none may hang, or abort once its work is done."""

from test_scripts import run


def test_launches_in_a_row_end_well(pytestconfig):
    launches = pytestconfig.getoption("--launches")
    assert launches > 0
    for number in range(launches):
        out, err = run("02", "--data", "printed", "--device", "cpu", "--limit", 100, "--seed", number)
        assert out.count("weights") == 2, f"launch {number + 1} of {launches}: {out}{err}"
        assert err == "", f"launch {number + 1} of {launches}: {err}"
