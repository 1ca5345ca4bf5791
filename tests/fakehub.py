"""A Hub on localhost that the unmodified huggingface_hub client accepts, with faults to order.

Standard library only; enough of the wire protocol for snapshot_download, model_info, list_repo_tree and
verify_repo_checksums. `tamper[path]` changes the body that is served and nothing that is advertised, as a broken proxy
or disk does; `cut` breaks off the body in the middle; `status` answers every request with an error.
"""

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".pt")
XET_CHUNK_BYTES = 64 * 1024


def git_sha1(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class FakeHub:
    def __init__(self, *, xet=False):
        self.repos, self.tamper, self.cut, self.hidden, self.log, self.xet_files = {}, {}, set(), set(), [], {}
        self.status, self.xet = None, xet

    def commit(self, repo_id, files, ref="main"):
        """Store `files` {path: bytes} as a commit; returns its 40-hex id."""
        entries = {path: self._entry(path, data) for path, data in files.items()}
        listing = repr(sorted((path, entry["oid"]) for path, entry in entries.items()))
        sha = hashlib.sha1(listing.encode(), usedforsecurity=False).hexdigest()
        repo = self.repos.setdefault(repo_id, {"commits": {}, "refs": {}})
        repo["commits"][sha], repo["refs"][ref] = entries, sha
        return sha

    def _entry(self, path, data):
        if not path.endswith(LFS_SUFFIXES):
            return {"path": path, "data": data, "oid": git_sha1(data)}
        sha256 = hashlib.sha256(data).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(data)}\n".encode()
        entry = {"path": path, "data": data, "oid": git_sha1(pointer), "sha256": sha256, "pointer": len(pointer)}
        if self.xet:  # any 64 digits do: the client checks neither these nor the content
            entry["xet"] = hashlib.sha256(b"xet" + data).hexdigest()
            self.xet_files[entry["xet"]] = entry
        return entry

    def __enter__(self):
        handler = type("BoundHandler", (Handler,), {"hub": self})
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
        for server in self.servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.endpoint, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self.servers)
        return self

    def __exit__(self, *exc):
        for server in self.servers:
            server.shutdown()
            server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.route()

    do_HEAD = do_POST = do_GET

    def reply(self, code, body=b"", headers=(), kind="application/json", cut=False):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {**dict(headers), "Content-Type": kind, "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def refuse(self, code, what):
        """Answer with an error; `what` is the code by which the client tells its errors apart."""
        self.reply(code, {"error": what}, {"X-Error-Code": what, "X-Error-Message": what})

    def route(self):
        url = urlsplit(self.path)
        self.hub.log.append(f"{self.command} {self.path}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if self.hub.status is not None:
            code, what = self.hub.status
            return self.refuse(code, what)
        if parts[0] == "cdn":
            return self.send_file(self.find("/".join(parts[1:3]), parts[3])[1]["/".join(parts[4:])], {"ETag": '"cdn"'})
        if "xet-read-token" in parts or parts[0] in ("v1", "v2", "xorb"):
            return self.route_xet(parts)
        if parts[:2] == ["api", "models"]:
            return self.route_api(url, "/".join(parts[2:4]), parts[4:])
        if "resolve" in parts:
            place = parts.index("resolve")
            return self.resolve("/".join(parts[:place]), parts[place + 1], "/".join(parts[place + 2 :]))
        return self.refuse(404, "RepoNotFound")

    def find(self, repo_id, revision):
        repo = self.hub.repos.get(repo_id)
        if repo is None:
            self.refuse(404, "RepoNotFound")
            return None
        sha = revision if revision in repo["commits"] else repo["refs"].get(revision)
        if sha is None:
            self.refuse(404, "RevisionNotFound")
            return None
        return sha, repo["commits"][sha]

    def route_api(self, url, repo_id, rest):
        found = self.find(repo_id, rest[1] if len(rest) > 1 else "main")
        if found is None:
            return None
        sha, entries = found
        if rest[:1] == ["tree"]:
            return self.reply(200, [tree_item(entry) for _, entry in sorted(entries.items())])
        if rest[:1] == ["paths-info"]:
            wanted = parse_qs(self.body.decode()).get("paths", [])
            return self.reply(200, [tree_item(entries[path]) for path in wanted if path in entries])
        siblings = [{"rfilename": path} for path in entries]
        return self.reply(200, {"id": repo_id, "modelId": repo_id, "sha": sha, "private": False, "tags": [],
                                "downloads": 0, "likes": 0, "siblings": siblings})  # fmt: skip

    def resolve(self, repo_id, revision, path):
        found = self.find(repo_id, revision)
        if found is None:
            return None
        sha, entries = found
        if path not in entries or path in self.hub.hidden:
            return self.reply(404, {"error": "entry"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        entry, headers = entries[path], {"X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if "sha256" not in entry:
            return self.send_file(entry, {**headers, "ETag": f'"{entry["oid"]}"'})
        etag = f'"{entry["sha256"]}"'
        headers |= {"X-Linked-Etag": etag, "X-Linked-Size": len(entry["data"]), "ETag": etag}
        if "xet" in entry:
            token = f"{self.hub.endpoint}/api/models/{repo_id}/xet-read-token/{sha}"
            headers |= {"X-Xet-Hash": entry["xet"], "Link": f'<{token}>; rel="xet-auth"'}
        headers["Location"] = f"{self.hub.cdn}/cdn/{repo_id}/{sha}/{quote(path)}"
        return self.reply(302, b"", headers)

    def send_file(self, entry, headers):
        data, path = entry["data"], entry["path"]
        if self.command == "GET" and path in self.hub.tamper:
            data = self.hub.tamper[path](data)
        asked = self.headers.get("Range")
        if asked and self.command == "GET":
            start = int(asked.split("=")[1].split("-")[0])
            span = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
            return self.reply(206, data[start:], {**headers, **span}, "application/octet-stream")
        return self.reply(200, data, headers, "application/octet-stream", cut=path in self.hub.cut)

    def route_xet(self, parts):
        """Serve a minimal content-addressed store: every file is one block of stored chunks."""
        hub = self.hub
        if "xet-read-token" in parts:
            expires = int(time.time()) + 3600
            headers = {"X-Xet-Cas-Url": hub.endpoint, "X-Xet-Access-Token": "t", "X-Xet-Token-Expiration": expires}
            return self.reply(200, {"casUrl": hub.endpoint, "accessToken": "t", "exp": expires}, headers)
        if parts[0] == "v2":
            return self.reply(404, {})
        if (entry := hub.xet_files.get(parts[-1])) is None:  # telemetry, for one
            return self.reply(404, {})
        if parts[0] == "xorb":
            block = xet_block(hub.tamper.get(entry["path"], bytes)(entry["data"]))
            span = {"Content-Range": f"bytes 0-{len(block) - 1}/{len(block)}"}
            return self.reply(206, block, span, "application/octet-stream")
        size = len(entry["data"])
        if int((self.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0]) >= size:
            return self.reply(416, {})
        chunks = -(-size // XET_CHUNK_BYTES)
        name = entry["xet"]
        term = {"hash": name, "unpacked_length": size, "range": {"start": 0, "end": chunks}}
        fetch = {
            "range": {"start": 0, "end": chunks},
            "url": f"{hub.endpoint}/xorb/{name}",
            "url_range": {"start": 0, "end": len(xet_block(entry["data"])) - 1},
        }
        return self.reply(200, {"offset_into_first_range": 0, "terms": [term], "fetch_info": {name: [fetch]}})


def tree_item(entry):
    item = {"type": "file", "oid": entry["oid"], "size": len(entry["data"]), "path": entry["path"]}
    if "sha256" in entry:
        item["lfs"] = {"oid": entry["sha256"], "size": len(entry["data"]), "pointerSize": entry["pointer"]}
    if "xet" in entry:
        item["xetHash"] = entry["xet"]
    return item


def xet_block(data):
    """Pack data as stored (not compressed) chunks, each behind an 8-byte header."""
    block = b""
    for start in range(0, len(data), XET_CHUNK_BYTES):
        chunk = data[start : start + XET_CHUNK_BYTES]
        length = len(chunk).to_bytes(3, "little")
        block += b"\0" + length + b"\0" + length + chunk
    return block
