"""The password of this workspace's Prefect server. Its holders can start flows here, which run code.

The server and its clients get it through the environment, never through a command line, which `ps` shows to every user.
"""

import base64
import os
import secrets
import stat
from pathlib import Path

NAME = "password"  # under PREFECT_HOME
CLIENT = "PREFECT_API_AUTH_STRING"
SERVER = "PREFECT_SERVER_API_AUTH_STRING"
FILE = "AERIE_PASSWORD_FILE"  # the environment variable that names a copy of the file on a worker's host
USER = "aerie"  # Prefect compares the whole line, user:password
RANDOM_BYTES = 32
LOOPBACK = ("127.0.0.1", "localhost")


def get_prefect_home() -> Path:
    """Return PREFECT_HOME, or the workspace's own."""
    return Path(os.environ.get("PREFECT_HOME") or Path(".prefect").resolve())


def read_or_create_password(home: Path) -> tuple[str, Path]:
    """Return the password kept in the folder `home`, and its file; create one if there is none. Raises as `read_password`."""
    file = home / NAME
    try:
        # Created exclusively with mode 0600: no other user can open the file before its mode is set.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_password(file), file
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        opened.write(f"{USER}:{secrets.token_urlsafe(RANDOM_BYTES)}\n")
        opened.flush()
        os.fsync(opened.fileno())
    return read_password(file), file


def read_password(file: Path) -> str:
    """Return the password in a file.

    Raises:
        ValueError: there is no such file, other users may read it, or it does not hold one line user:password.
    """
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        text = file.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise ValueError(f"the server's password can't be read: {error}") from None
    if mode & 0o077:
        raise ValueError(
            f"{file} holds the server's password and has mode {mode:04o}, expected 0600; run: chmod 600 {file}; where others use "
            "this machine, move it away for a new one"
        )
    user, colon, password = text.partition(":")
    if not (user and colon and password) or not text.isprintable() or " " in text:
        raise ValueError(f"{file}: expected one line user:password; move the file away, and `make ui` makes a new one")
    return text


def find_password() -> str:
    """Return a client's password: from the environment, from the file it names, or of this workspace's server.

    Raises:
        ValueError: there is none, or as `read_password`.
    """
    if given := os.environ.get(CLIENT):
        return given
    if named := os.environ.get(FILE):
        return read_password(Path(named))
    own = get_prefect_home() / NAME
    if own.exists():
        return read_password(own)
    raise ValueError(
        f"no password for the Prefect server in {CLIENT}, {FILE} or {own}; copy the file that `make ui` names here, mode 0600, "
        f"and export {FILE}=THAT_FILE"
    )


def exempt_loopback() -> None:
    """Let no proxy of the environment have requests to this machine: its 127.0.0.1 is another, and it would see the password.

    Prefect's clients go by the environment; so do the processes that this one starts.
    """
    names = ("no_proxy", "NO_PROXY")
    hosts = [host for name in names for host in os.environ.get(name, "").split(",") if host]
    os.environ |= dict.fromkeys(names, ",".join(dict.fromkeys([*hosts, *LOOPBACK])))


def build_auth_header(password: str) -> dict[str, str]:
    """Return the HTTP header that carries the password."""
    return {"Authorization": f"Basic {base64.b64encode(password.encode()).decode()}"}
