"""Settings from the environment and from arguments."""

import pytest

from service.settings import Settings, SettingsError


def test_arguments_win_over_the_environment(tmp_path):
    environ = {"PADFREE_PORT": "9000", "PADFREE_MAX_JOBS": "3", "PADFREE_STORE": str(tmp_path / "a")}
    found = Settings.from_environment(environ, port=9001)
    assert (found.port, found.max_jobs, found.store) == (9001, 3, str(tmp_path / "a"))


def test_every_kind_of_value_is_read(tmp_path):
    environ = {
        "PADFREE_TOKENS": "one, two,",
        "PADFREE_DATA_ROOTS": f"{tmp_path}/a:{tmp_path}/b",
        "PADFREE_PACKING": "false",
        "PADFREE_WORKERS": "4",
        "PADFREE_SHUTDOWN_S": "2.5",
        "PADFREE_LOG_FORMAT": "JSON",
        "PADFREE_RAY_ADDRESS": "",
    }
    found = Settings.from_environment(environ)
    assert found.tokens == ("one", "two")
    assert found.data_roots == (tmp_path / "a", tmp_path / "b")
    assert (found.packing, found.workers, found.shutdown_s) == (False, 4, 2.5)
    assert (found.log_format, found.ray_address) == ("json", None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "x"),
        ("PORT", "70000"),
        ("PACKING", "maybe"),
        ("LOG_FORMAT", "xml"),
        ("MAX_JOBS", "0"),
        ("WORKERS", "-1"),
    ],
)
def test_a_wrong_setting_is_named(name, value):
    with pytest.raises(SettingsError, match=f"PADFREE_{name}.*required.*{value}"):
        Settings.from_environment({f"PADFREE_{name}": value})


def test_tokens_do_not_show_when_settings_are_printed():
    assert "secret" not in repr(Settings.from_environment({"PADFREE_TOKENS": "secret"}))
