"""unspool inspect: starts a server and opens its page in a browser."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from urllib.parse import urlencode

from unspool.cli import serve
from unspool.cli.parser import UsageError

DESCRIPTION = """\
Start a server on this machine and open the inspector: a page that shows each token with what else could have come,
why it was chosen, and what would have followed otherwise. It takes the options of `unspool serve`."""
EPILOG = """\
examples:
  unspool inspect
  unspool inspect "The capital of France is" -m model.gguf
  unspool inspect --port 9000 --no-browser

Ctrl-C ends it."""


def main(argv: Sequence[str]) -> int:
    parser = serve.make_parser("inspect", "[options] [PROMPT]", DESCRIPTION, EPILOG, port=0, log="off")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="what the page's prompt is at first")
    parser.add_argument("--no-browser", action="store_true", help="print the address and open nothing")
    namespace = parser.parse_args(argv)
    if namespace.replicas is not None:
        raise UsageError("inspect shows one engine; unspool serve takes --replicas")
    from unspool.web import HOW_TO_BUILD, is_built

    if not is_built():
        raise UsageError(HOW_TO_BUILD)
    path = "/" if namespace.prompt is None else f"/?{urlencode({'prompt': namespace.prompt})}"

    def on_start(address: str) -> None:
        url = address + path
        if namespace.no_browser or not open_browser(url):
            from unspool.cli.terminal import note

            note(f"open {url}", style="")

    return serve.run(namespace, on_start)


def open_browser(url: str) -> bool:
    """Open a page in a browser; returns whether there is one. Runs in its own thread, because some browsers block."""
    import webbrowser

    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    if getattr(browser, "name", "") in ("www-browser", "links", "elinks", "lynx", "w3m"):
        return False  # text browsers would occupy the terminal and run no scripts
    threading.Thread(target=browser.open, args=(url,), daemon=True).start()
    return True
