"""A Hugging Face Hub in memory, for the unmodified `huggingface_hub` client: `HF_ENDPOINT` is `HubServer.url`.

It speaks the Hub's REST protocol for repositories of models and data sets as the client does with
`HF_HUB_DISABLE_XET=1`, so large files take the LFS path. It listens on two ports of the loopback, since the Hub's large
files are on another host than the Hub and the client treats a redirect to another origin differently: it stops at it,
and it keeps its token to itself.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import re
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LFS_SUFFIXES = (".safetensors", ".bin", ".png", ".parquet")
LFS_SIZE = 10 * 2**20
PARTS = {"repo": "(?:datasets/)?[^/]+/[^/]+", "rev": "[^/]+", "path": ".+", "kind": "branch|tag", "sha": "[0-9a-f]{64}"}
PARTS = {name: f"(?P<{name}>{pattern})" for name, pattern in PARTS.items()}
ROUTES: list[tuple[str, re.Pattern[str], Endpoint]] = []


def route(method: str, template: str) -> Callable[[Endpoint], Endpoint]:
    """Let a method of `HubServer` answer the requests to such addresses."""

    def register(endpoint: Endpoint) -> Endpoint:
        pattern = template.format(**PARTS).replace("/api/models/", "/api/(?:models/|(?=datasets/))")
        ROUTES.append((method, re.compile(pattern), endpoint))
        return endpoint

    return register


@dataclass(frozen=True)
class Response:
    """An answer, to a GET or to a HEAD: its `Content-Length` is that of the body."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def part(self, wanted: str | None) -> Response:
        """What a `Range` header asks of a whole file."""
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "")
        if not found or self.status != 200 or "Accept-Ranges" not in self.headers:
            return self
        first, size = int(found[1]), len(self.body)
        last = min(int(found[2] or size), size - 1)
        if first > last:
            return Response(416, headers={"Content-Range": f"bytes */{size}"})
        headers = {**self.headers, "Content-Range": f"bytes {first}-{last}/{size}"}
        return Response(206, self.body[first : last + 1], headers)


def as_json(value: object, status: int = 200, **headers: str) -> Response:
    body = json.dumps(value).encode()
    return Response(status, body, {"Content-Type": "application/json; charset=utf-8", **headers})


class Refusal(Exception):
    """An answer that is an error; the client tells the kinds apart by `X-Error-Code`."""

    def __init__(self, status: int, message: str, code: str = "", commit: str = "") -> None:
        super().__init__(message)
        headers = {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": commit}
        self.response = as_json({"error": message}, status, **{name: text for name, text in headers.items() if text})


class Blob:
    """One version of a file. Of an LFS file, git holds only a pointer to the bytes."""

    def __init__(self, content: bytes, lfs: bool) -> None:
        self.content, self.lfs = content, lfs
        self.sha256 = hashlib.sha256(content).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(content)}\n"
        self.in_git = pointer.encode() if lfs else content
        self.oid = hashlib.sha1(b"blob %d\0" % len(self.in_git) + self.in_git).hexdigest()

    def describe(self) -> dict:
        lfs = {"oid": self.sha256, "size": len(self.content), "pointerSize": len(self.in_git)}
        return {"size": len(self.content), "oid": self.oid, **({"lfs": lfs} if self.lfs else {})}


@dataclass(frozen=True)
class Commit:
    """All the files of a repository at one moment."""

    oid: str
    parent: str | None
    files: dict[str, Blob]

    def missing(self) -> Refusal:
        # the commit lets the client remember that the file does not exist
        return Refusal(404, "Entry not found", "EntryNotFound", self.oid)

    def entries(self) -> list[dict]:
        """All files, as a listing shows them."""
        files = sorted(self.files.items())
        return [{"type": "file", "path": path, **blob.describe()} for path, blob in files]


@dataclass
class Repo:
    """A repository; its `objects` are the LFS files that were uploaded, committed or not.

    The `id` of a data set begins with `datasets/`.
    """

    id: str
    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    announced: dict[str, int] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        return self.id.split("/")[-2]

    def visible_to(self, user: str | None) -> bool:
        return not self.private or user == self.owner

    def at(self, revision: str) -> Commit:
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        if oid not in self.commits:
            raise Refusal(404, f"Invalid rev id: {revision!a}", "RevisionNotFound")
        return self.commits[oid]

    def history(self, revision: str) -> Iterator[Commit]:
        commit: Commit | None = self.at(revision)
        while commit:
            yield commit
            commit = self.commits.get(commit.parent or "")

    def changed(self, commit: Commit, lines: list[dict]) -> dict[str, Blob]:
        """The files of a commit after the operations of the next one."""
        files = dict(commit.files)
        for key, value in ((line["key"], line["value"]) for line in lines):
            path = value["path"].rstrip("/")
            if key == "file":
                files[path] = Blob(base64.b64decode(value["content"], validate=True), lfs=False)
            elif key == "lfsFile" and value["oid"] in self.objects:
                files[path] = Blob(self.objects[value["oid"]], lfs=True)
            elif key == "lfsFile":
                raise Refusal(400, "An LFS pointer pointed to a file that does not exist")
            elif key == "deletedFile" and path in files:
                del files[path]
            else:
                raise Refusal(400, "Unknown operation")
        return files


@dataclass(frozen=True)
class Request:
    """What a client asks: who it is, the parts and the query of the address, the body."""

    repos: dict[str, Repo]
    user: str | None
    parts: dict[str, str]
    query: dict[str, list[str]]
    body: bytes

    def json(self) -> dict:
        return json.loads(self.body or b"{}")

    def flag(self, name: str) -> bool:
        return self.query.get(name, [""])[0].lower() in ("1", "true")

    def readable(self, name: str = "") -> Repo:
        """The repository of the address; one that the user may not see is as one that does not exist."""
        repo = self.repos.get(name or self.parts["repo"])
        if repo and repo.visible_to(self.user):
            return repo
        if self.user is None:
            raise Refusal(401, "Invalid username or password.", "RepoNotFound")
        raise Refusal(404, "Repository not found", "RepoNotFound")

    def writable(self, name: str = "") -> Repo:
        repo = self.readable(name)
        self.check_owner(repo.owner)
        return repo

    def check_owner(self, namespace: str) -> None:
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        if self.user != namespace:
            raise Refusal(403, "You don't have the rights to write to this namespace")
        if self.flag("create_pr"):
            raise Refusal(403, "Pull requests are disabled")

    def commit(self) -> Commit:
        return self.readable().at(self.parts["rev"] or "main")


Endpoint = Callable[["HubServer", Request], Response]


@dataclass
class Fault:
    """What is to go wrong, with which requests, and how often."""

    method: str
    pattern: re.Pattern[str]
    kind: int | str
    times: int | None

    def strikes(self, method: str, path: str) -> bool:
        if method != self.method or self.times == 0 or not self.pattern.search(path):
            return False
        if self.times is not None:
            self.times -= 1
        return True


def is_lfs(path: str, size: int) -> bool:
    return path.endswith(LFS_SUFFIXES) or size > LFS_SIZE


def tags_of(commit: Commit) -> list[str]:
    """The tags that the Hub gives a model by the metadata of its card."""
    card = commit.files.get("README.md")
    found = re.match(r"---\n(.*?)\n---\n", card.content.decode() if card else "", re.DOTALL)
    metadata = (yaml.safe_load(found[1]) if found else None) or {}
    bases = metadata.get("base_model") or []
    bases = bases if isinstance(bases, list) else [bases]
    library = [metadata["library_name"]] if metadata.get("library_name") else []
    return [*library, *metadata.get("tags", []), *(f"base_model:{base}" for base in bases)]


def damaged(body: bytes, kind: int | str | None) -> bytes:
    half = len(body) // 2
    if kind == "flip" and body:
        return body[:half] + bytes([body[half] ^ 1]) + body[half + 1 :]
    return body[:half] if kind in ("cut", "truncate") else body


class Handler(BaseHTTPRequestHandler):
    """One connection. A fault strikes the body of the request, or that of the answer where the request has none."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are written apart, and the second would wait
    server: Server

    def serve(self) -> None:
        kind = self.server.hub.arrived(self.command, self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length // 2 if kind == "cut" else length)
        if len(body) < length:  # cut by a fault or by the client: nothing of it is kept
            self.close_connection = True
        elif isinstance(kind, int):
            self.answer(Refusal(kind, "This failure was asked for").response, None)
        else:
            authorization = self.headers.get("Authorization", "")
            response = self.server.hub.respond(self.command, self.path, authorization, damaged(body, kind))
            self.answer(response, None if length else kind)

    do_GET = do_HEAD = do_POST = do_PUT = serve

    def answer(self, response: Response, kind: str | None) -> None:
        if kind == "truncate":  # a file that is short on the hub is short before a part of it is taken
            response, kind = replace(response, body=damaged(response.body, kind)), None
        if self.command == "GET":
            response = response.part(self.headers.get("Range"))
        body = b"" if self.command == "HEAD" else response.body
        if kind == "cut":
            self.close_connection = True
        if kind != "cut" or body:
            self.send_response(response.status)
            for name, value in {**response.headers, "Content-Length": str(len(response.body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(damaged(body, kind))

    def log_message(self, *_: object) -> None:
        pass


class Server(socketserver.ThreadingTCPServer):
    """One port of the hub, with a thread for each connection."""

    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, hub: HubServer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = hub
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.connections: list[tuple[threading.Thread, socket.socket]] = []
        self.loop = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self.loop.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        self.connections.append((thread, request))
        thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if error and not isinstance(error, ConnectionError):
            self.hub.errors.append(error)

    def close(self) -> None:
        self.shutdown()
        self.loop.join()
        self.server_close()
        for thread, connection in self.connections:
            with contextlib.suppress(OSError):  # most are closed already
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()


class HubServer(contextlib.AbstractContextManager["HubServer"]):
    """The hub of the users whose tokens it knows, on `url`; `requests` are the (method, path with query) so far.

    As on the Hub, a new repository starts with a commit that holds its `.gitattributes`.
    """

    def __init__(self, tokens: Mapping[str, str] | None = None) -> None:
        self.tokens = dict(tokens or {})
        self.requests: list[tuple[str, str]] = []
        self.errors: list[BaseException] = []
        self._repos: dict[str, Repo] = {}
        self._faults: list[Fault] = []
        self._counter = itertools.count()
        self._lock = threading.Lock()
        self._servers = [Server(self), Server(self)]
        self.url, self.cdn_url = (server.url for server in self._servers)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop; raises where the hub itself had a bug, which a client may have taken for a bad connection."""
        for server in self._servers:
            server.close()
        if self.errors:
            raise RuntimeError("the hub failed") from self.errors[0]

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        return {path: blob.content for path, blob in self._repos[repo].at(revision).files.items()}

    def commits(self, repo: str) -> list[str]:
        """The hashes of main, the newest first."""
        return [commit.oid for commit in self._repos[repo].history("main")]

    def put(self, repo: str, files: Mapping[str, bytes], private: bool = False, revision: str = "main") -> str:
        """Commit files without HTTP, to a repository and a branch that are made where they are missing."""
        with self._lock:
            target = self._repos.get(repo) or self._create(repo, private)
            head = target.branches.setdefault(revision, target.branches["main"])
            blobs = {path: Blob(content, is_lfs(path, len(content))) for path, content in files.items()}
            target.objects.update({blob.sha256: blob.content for blob in blobs.values() if blob.lfs})
            return self._commit(target, revision, {**target.commits[head].files, **blobs})

    def fail(self, method: str, pattern: str, kind: int | str, times: int | None = 1) -> None:
        """Let requests fail whose path and query the pattern is found in: with an HTTP status, or by a fault.

        The body that is sent up, or else the one that is sent down, is "cut": the connection closes after half of it;
        has one bit changed by a "flip"; or is half as long and says so, "truncate". The first fault that fits strikes.
        """
        with self._lock:
            self._faults.append(Fault(method.upper(), re.compile(pattern), kind, times))

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()

    def arrived(self, method: str, path: str) -> int | str | None:
        """Note a request, and tell the fault that strikes it."""
        with self._lock:
            self.requests.append((method, path))
            return next((fault.kind for fault in self._faults if fault.strikes(method, path)), None)

    def respond(self, method: str, target: str, authorization: str, body: bytes) -> Response:
        url, token = urlsplit(target), authorization.removeprefix("Bearer ")
        try:
            if token and token not in self.tokens:
                raise Refusal(401, "Invalid credentials in Authorization header")
            for verb, pattern, endpoint in ROUTES:
                if verb == method.replace("HEAD", "GET") and (match := pattern.fullmatch(url.path)):
                    parts = {name: unquote(part or "") for name, part in match.groupdict().items()}
                    user, query = self.tokens.get(token), parse_qs(url.query)
                    with self._lock:
                        return endpoint(self, Request(self._repos, user, parts, query, body))
            raise Refusal(404, "Sorry, we can't find the page you are looking for.")
        except Refusal as refusal:
            return refusal.response
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return Refusal(400, f"Malformed request: {error!a}").response

    def _create(self, repo: str, private: bool) -> Repo:
        self._repos[repo] = created = Repo(repo, private)
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
        self._commit(created, "main", {".gitattributes": Blob(attributes.encode(), lfs=False)})
        return created

    def _commit(self, repo: Repo, branch: str, files: dict[str, Blob]) -> str:
        parent = repo.branches.get(branch)
        identity = [repo.id, parent, sorted((path, blob.oid) for path, blob in files.items()), next(self._counter)]
        oid = hashlib.sha1(json.dumps(identity).encode()).hexdigest()
        repo.commits[oid] = Commit(oid, parent, files)
        repo.branches[branch] = oid
        return oid

    @route("POST", "/api/validate-yaml")
    def _validate_yaml(self, ask: Request) -> Response:
        found = re.match(r"---\n(.*?)\n---\n", ask.json()["content"], re.DOTALL)
        if found and not isinstance(yaml.safe_load(found[1]), dict):
            return as_json({"errors": [{"message": '"metadata" must be of type object'}], "warnings": []}, 400)
        return as_json({"errors": [], "warnings": []})

    @route("POST", "/api/repos/create")
    def _create_repo(self, ask: Request) -> Response:
        wanted = ask.json()
        kind = wanted.get("type") or "model"
        if kind not in ("model", "dataset"):
            raise Refusal(404, "There are only models and data sets here")
        namespace = wanted.get("organization") or ask.user or ""
        ask.check_owner(namespace)
        name = f"{namespace}/{wanted['name']}"
        repo = name if kind == "model" else f"datasets/{name}"
        answer = {"url": f"{self.url}/{repo}", "name": name}
        if repo in self._repos:
            return as_json({"error": f"You already created this {kind} repo", **answer}, 409)
        self._create(repo, wanted.get("visibility") == "private" or wanted.get("private") is True)
        return as_json(answer)

    @route("GET", "/api/models/{repo}(?:/revision/{rev})?")
    def _model(self, ask: Request) -> Response:
        repo, commit = ask.readable(), ask.commit()
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        name = repo.id.removeprefix("datasets/")
        info = {"id": name, "modelId": name, "author": repo.owner, "sha": commit.oid, "private": repo.private}
        return as_json({**info, "gated": False, "disabled": False, "siblings": siblings, "tags": tags_of(commit)})

    @route("GET", "/api/models")
    def _list_models(self, ask: Request) -> Response:
        models = [repo for repo in self._repos.values() if repo.visible_to(ask.user) and repo.id.count("/") == 1]
        wanted, most = ask.query.get("filter", []), int(ask.query.get("limit", ["1000"])[0])
        listed = [(repo.id, repo.at("main")) for repo in models if {*wanted} <= {*tags_of(repo.at("main"))}]
        listed = sorted(listed, key=lambda each: each[0])[:most]
        infos = [{"id": name, "sha": commit.oid, "tags": tags_of(commit), "downloads": 0} for name, commit in listed]
        files = [[{"rfilename": path} for path in sorted(commit.files)] for _, commit in listed]
        return as_json([{**info, "siblings": each} for info, each in zip(infos, files, strict=True)])

    @route("GET", "/api/models/{repo}/tree/{rev}")
    def _tree(self, ask: Request) -> Response:
        return as_json(ask.commit().entries())

    @route("POST", "/api/models/{repo}/{kind}/{rev}")
    def _create_ref(self, ask: Request) -> Response:
        repo, wanted = ask.writable(), ask.json()
        name, start, refs = ask.parts["rev"], wanted.get("startingPoint", "main"), repo.branches
        if ask.parts["kind"] == "tag":  # here the address holds the revision, not the name
            name, start, refs = wanted["tag"], ask.parts["rev"], repo.tags
        if name in refs:
            raise Refusal(409, "Reference already exists")
        refs[name] = repo.at(start).oid
        return Response()

    @route("POST", "/api/models/{repo}/preupload/{rev}")
    def _preupload(self, ask: Request) -> Response:
        ask.writable()
        commit, answers = ask.commit(), []
        for item in ask.json()["files"]:
            mode = "lfs" if is_lfs(item["path"], item["size"]) else "regular"
            answers.append({"path": item["path"], "uploadMode": mode, "shouldIgnore": False})
            if blob := commit.files.get(item["path"]):
                answers[-1]["oid"] = blob.sha256 if blob.lfs else blob.oid
        return as_json({"files": answers, "commitOid": commit.oid})

    @route("POST", r"/{repo}\.git/info/lfs/objects/batch")
    def _lfs_batch(self, ask: Request) -> Response:
        repo, wanted = ask.writable(), ask.json()
        if wanted["operation"] != "upload" or "basic" not in wanted.get("transfers", ["basic"]):
            raise Refusal(400, "There are only basic uploads here")
        objects = [{"oid": item["oid"], "size": item["size"]} for item in wanted["objects"]]
        for item in objects:
            if item["oid"] not in repo.objects:
                repo.announced[item["oid"]] = item["size"]
                item["actions"] = {"upload": {"href": f"{self.cdn_url}/upload/{repo.id}/{item['oid']}"}}
        return as_json({"transfer": "basic", "objects": objects})

    @route("PUT", "/upload/{repo}/{sha}")
    def _lfs_upload(self, ask: Request) -> Response:
        repo, sha = self._repos[ask.parts["repo"]], ask.parts["sha"]  # who was given the address may write
        if repo.announced.get(sha) != len(ask.body) or hashlib.sha256(ask.body).hexdigest() != sha:
            raise Refusal(400, "The object is not what was announced")
        repo.objects[sha] = ask.body
        return Response()

    @route("POST", "/api/models/{repo}/commit/{rev}")
    def _post_commit(self, ask: Request) -> Response:
        repo, branch, head = ask.writable(), ask.parts["rev"], ask.commit()
        if branch not in repo.branches:
            raise Refusal(400, "Commits go to branches")
        header, *lines = (json.loads(line) for line in ask.body.splitlines())
        if not head.oid.startswith(header["value"].get("parentCommit", "")):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        oid = self._commit(repo, branch, repo.changed(head, lines))
        return as_json({"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{repo.id}/commit/{oid}"})

    @route("GET", "/{repo}/resolve/{rev}/{path}")
    def _resolve(self, ask: Request) -> Response:
        commit = ask.commit()
        blob = commit.files.get(ask.parts["path"])
        if blob is None:
            raise commit.missing()
        headers = {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        if not blob.lfs:
            return Response(200, blob.content, {**headers, "ETag": f'"{blob.oid}"'})
        headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.content))}
        return Response(302, headers={**headers, "Location": f"{self.cdn_url}/cdn/{blob.sha256}"})

    @route("GET", "/cdn/{sha}")
    def _cdn(self, ask: Request) -> Response:
        sha = ask.parts["sha"]
        content = next((repo.objects[sha] for repo in self._repos.values() if sha in repo.objects), None)
        if content is None:
            raise Refusal(404, "There is no such object")
        return Response(200, content, {"Accept-Ranges": "bytes", "ETag": f'"{sha}"'})
