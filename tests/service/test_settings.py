"""Settings from the environment and from arguments."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from service.main import check_store
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


@pytest.mark.parametrize("packing", [True, False])
def test_a_store_that_can_never_be_used_is_refused(tmp_path, packing):
    file = tmp_path / "file"
    file.write_text("no folder")
    for store in (file, file / "below") if packing else (file,):
        with pytest.raises(SettingsError, match=rf"\(--store\): a folder .* is required, found {store}"):
            check_store(Settings.from_environment({}, store=store, packing=packing))
    check_store(Settings.from_environment({}, store=tmp_path / "new", packing=packing))
    check_store(Settings.from_environment({}, store="s3://bucket/may-come-later", packing=packing))


@pytest.mark.parametrize(
    ("number", "refused"), [(errno.EACCES, True), (errno.EROFS, True), (errno.EIO, False)]
)
def test_a_store_that_may_come_back_is_waited_for(tmp_path, monkeypatch, number, refused):
    def write_bytes(path, data):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    settings = Settings.from_environment({}, store=tmp_path)
    with pytest.raises(SettingsError, match=os.strerror(number)) if refused else nullcontext():
        check_store(settings)
