//! Uploads: a folder as one commit, by the hub's commit API. Large files go to the store that Git
//! LFS's batch API names first, whole or in parts; small ones travel within the commit.
//!
//! Ours and not the `hf` program's, so that a machine needs no Python; hf-hub 1.0 sends large files
//! through Xet alone, which costs 297 crates (decision 115).

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use base64ct::{Base64, Encoding as _};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use shardpack_http::{Checksum, Failed, HttpError, Method, Payload, Request};

use super::{
    HubError, ModelName, Visibility,
    api::{Api, MAX_ANSWER_BYTES, WHOLE, one_segment, parse},
};

/// Bytes of a file's beginning by which the hub decides how it travels.
const SAMPLE_BYTES: u64 = 512;
/// Files of one question to the hub.
const FILES_PER_REQUEST: usize = 250;
/// Largest file within a commit: the hub sends larger ones to its store.
const MAX_INLINE_BYTES: u64 = 32 << 20;
/// Parts of one large file.
const MAX_PARTS: u64 = 100_000;
/// Media type of Git LFS's batch API.
const LFS: &str = "application/vnd.git-lfs+json";

/// A file to upload.
struct Upload {
    /// Path in the repository.
    path: String,
    source: PathBuf,
    size: u64,
    sha256: Checksum,
    is_large: bool,
}

/// How a large file travels.
#[derive(Deserialize)]
struct Object {
    oid: String,
    #[serde(default)]
    actions: Option<Actions>,
    #[serde(default)]
    error: Option<ObjectError>,
}

#[derive(Deserialize)]
struct ObjectError {
    message: String,
}

#[derive(Deserialize)]
struct Actions {
    #[serde(default)]
    upload: Option<Action>,
    #[serde(default)]
    verify: Option<Action>,
}

#[derive(Deserialize)]
struct Action {
    href: String,
    #[serde(default)]
    header: Map<String, Value>,
}

impl Api {
    /// Uploads a folder as one commit to a model's repository, which is created unless it exists;
    /// returns the commit.
    pub(super) fn upload(
        &self,
        name: &ModelName,
        folder: &Path,
        visibility: Visibility,
    ) -> Result<String, HubError> {
        if !self.has_token {
            let problem = format!(
                "{}/{name}: uploading needs a token with write access; set HF_TOKEN",
                self.endpoint
            );
            return Err(HubError::Option(problem));
        }
        let mut files = files_of(folder)?;
        self.create(name, visibility)?;
        for files in files.chunks_mut(FILES_PER_REQUEST) {
            self.choose_modes(name, files)?;
        }
        let large: Vec<&Upload> = files.iter().filter(|file| file.is_large).collect();
        for files in large.chunks(FILES_PER_REQUEST) {
            self.store(name, files)?;
        }
        self.commit_files(name, &files)
    }

    /// Creates the repository unless it exists.
    fn create(&self, name: &ModelName, visibility: Visibility) -> Result<(), HubError> {
        let url = format!("{}/api/repos/create", self.endpoint);
        let repo = name.repo();
        let (owner, model) = repo.split_once('/').unwrap_or(("", &repo));
        let body = json!({
            "name": model,
            "organization": owner,
            "type": "model",
            "private": visibility == Visibility::Private,
        });
        // 409: it exists.
        self.post(name, &url, "application/json", body.to_string().as_bytes(), &[200, 201, 409])?;
        Ok(())
    }

    /// Asks which files are large ones.
    fn choose_modes(&self, name: &ModelName, files: &mut [Upload]) -> Result<(), HubError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Mode {
            path: String,
            upload_mode: String,
        }
        #[derive(Deserialize)]
        struct Modes {
            files: Vec<Mode>,
        }
        let mut asked = Vec::new();
        for file in &*files {
            let mut sample = Vec::new();
            let read = File::open(&file.source)
                .and_then(|open| open.take(SAMPLE_BYTES).read_to_end(&mut sample));
            read.map_err(|source| unreadable(&file.source, source))?;
            let sample = Base64::encode_string(&sample);
            asked.push(json!({ "path": file.path, "size": file.size, "sample": sample }));
        }
        let url = self.model_url(name, &format!("preupload/{}", one_segment(&name.revision)));
        let body = json!({ "files": asked }).to_string();
        let text = self.post(name, &url, "application/json", body.as_bytes(), &[200])?;
        let modes: Modes = parse(&url, &text)?;
        for file in files {
            let mode = modes.files.iter().find(|mode| mode.path == file.path);
            // Empty files cannot be stored by their digest.
            file.is_large = file.size > 0 && mode.is_some_and(|mode| mode.upload_mode == "lfs");
            if !file.is_large && file.size > MAX_INLINE_BYTES {
                let problem = format!(
                    "the hub wants {} ({} bytes) within the commit, which holds at most {MAX_INLINE_BYTES} bytes of a file",
                    file.path, file.size
                );
                return Err(HttpError::Answer { url, problem }.into());
            }
        }
        Ok(())
    }

    /// Sends large files to the store, unless it has them.
    fn store(&self, name: &ModelName, files: &[&Upload]) -> Result<(), HubError> {
        #[derive(Deserialize)]
        struct Batch {
            objects: Vec<Object>,
        }
        let url = format!("{}/{}.git/info/lfs/objects/batch", self.endpoint, name.repo());
        let objects: Vec<Value> = files
            .iter()
            .map(|file| json!({ "oid": file.sha256.text(), "size": file.size }))
            .collect();
        let body = json!({
            "operation": "upload",
            "transfers": ["basic", "multipart"],
            "objects": objects,
            "hash_algo": "sha256",
            "ref": { "name": name.revision },
        });
        let text = self.post(name, &url, LFS, body.to_string().as_bytes(), &[200])?;
        let batch: Batch = parse(&url, &text)?;
        for file in files {
            let oid = file.sha256.text();
            let wrong = |problem: String| HttpError::Answer { url: url.clone(), problem };
            let object = batch.objects.iter().find(|object| object.oid == oid);
            let object =
                object.ok_or_else(|| wrong(format!("the store says nothing of {}", file.path)))?;
            if let Some(error) = &object.error {
                return Err(wrong(format!("{}: {}", file.path, error.message)).into());
            }
            // Without actions the store has the file.
            let Some(actions) = &object.actions else { continue };
            if let Some(upload) = &actions.upload {
                self.send_object(name, file, upload)?;
            }
            if let Some(verify) = &actions.verify {
                let body = json!({ "oid": oid, "size": file.size }).to_string();
                self.post(name, &verify.href, LFS, body.as_bytes(), &[200])?;
            }
        }
        Ok(())
    }

    /// Sends one large file: whole, or in parts where the store states their size.
    fn send_object(
        &self,
        name: &ModelName,
        file: &Upload,
        upload: &Action,
    ) -> Result<(), HubError> {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let Some(part_bytes) = upload.header.get("chunk_size").map(text) else {
            self.put(name, &upload.href, file, 0, file.size)?;
            return Ok(());
        };
        let wrong = |problem: String| HttpError::Answer { url: upload.href.clone(), problem };
        let part_bytes: u64 = part_bytes.parse().unwrap_or(0);
        let count = file.size.checked_div(part_bytes).unwrap_or(u64::MAX);
        if count > MAX_PARTS {
            return Err(wrong(format!("parts of {part_bytes} bytes for {}", file.path)).into());
        }
        let mut parts = Vec::new();
        for (number, start) in (1..).zip((0..file.size).step_by(part_bytes as usize)) {
            // The store names them "1", "2", …, or "00001", "00002", ….
            let url = upload.header.iter().find(|(key, _)| key.parse() == Ok(number));
            let (_, url) =
                url.ok_or_else(|| wrong(format!("no URL for part {number} of {}", file.path)))?;
            let end = (start + part_bytes).min(file.size);
            let tag = self.put(name, &text(url), file, start, end)?;
            parts.push(json!({ "partNumber": number, "etag": tag }));
        }
        let body = json!({ "oid": file.sha256.text(), "parts": parts }).to_string();
        self.post(name, &upload.href, LFS, body.as_bytes(), &[200, 201])?;
        Ok(())
    }

    /// Sends bytes of a file; returns the store's tag of them.
    fn put(
        &self,
        name: &ModelName,
        url: &str,
        file: &Upload,
        start: u64,
        end: u64,
    ) -> Result<String, HubError> {
        let request = Request {
            method: Method::Put,
            payload: Payload::File(&file.source, start, end),
            patience: Some(WHOLE),
            ..Request::get(url)
        };
        self.retry(url, name, &mut || {
            let answer = self.client.send(&request)?;
            if !(200..300).contains(&answer.status()) {
                return Err(answer.refusal());
            }
            Ok(answer.header("etag").to_owned())
        })
    }

    /// Makes one commit of all files.
    fn commit_files(&self, name: &ModelName, files: &[Upload]) -> Result<String, HubError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Commit {
            #[serde(default)]
            commit_oid: String,
        }
        let summary = json!({ "summary": "Upload a shardpack package set", "description": "" });
        let mut lines = json!({ "key": "header", "value": summary }).to_string();
        for file in files {
            let line = if file.is_large {
                json!({ "key": "lfsFile", "value": {
                    "path": file.path,
                    "algo": "sha256",
                    "oid": file.sha256.text(),
                    "size": file.size,
                }})
            } else {
                let bytes = fs::read(&file.source);
                let bytes = bytes.map_err(|source| unreadable(&file.source, source))?;
                json!({ "key": "file", "value": {
                    "path": file.path,
                    "encoding": "base64",
                    "content": Base64::encode_string(&bytes),
                }})
            };
            lines.push('\n');
            lines.push_str(&line.to_string());
        }
        lines.push('\n');
        let url = self.model_url(name, &format!("commit/{}", one_segment(&name.revision)));
        let text = self.post(name, &url, "application/x-ndjson", lines.as_bytes(), &[200, 201])?;
        Ok(parse::<Commit>(&url, &text)?.commit_oid)
    }

    /// Posts a body; returns the answer.
    fn post(
        &self,
        name: &ModelName,
        url: &str,
        media_type: &str,
        body: &[u8],
        accepted: &[u16],
    ) -> Result<Vec<u8>, HubError> {
        let mut headers = vec![("content-type", media_type.to_owned())];
        if media_type == LFS {
            headers.push(("accept", LFS.to_owned()));
        }
        let request = Request {
            method: Method::Post,
            headers,
            payload: Payload::Bytes(body),
            patience: Some(WHOLE),
            ..Request::get(url)
        };
        self.retry(url, name, &mut || {
            let mut answer = self.client.send(&request)?;
            if !accepted.contains(&answer.status()) {
                return Err(match answer.refusal() {
                    // What the hub refuses, it explains in the body.
                    Failed::Final(HttpError::Status { url, status, code, .. }) => {
                        let body = answer.read(MAX_ANSWER_BYTES).unwrap_or_default();
                        let message = String::from_utf8_lossy(&body).into_owned();
                        Failed::Final(HttpError::Status { url, status, code, message })
                    }
                    failed => failed,
                });
            }
            answer.read(MAX_ANSWER_BYTES)
        })
    }
}

/// The files of a folder and its folders, in the order of their names.
fn files_of(folder: &Path) -> Result<Vec<Upload>, HubError> {
    let mut found = Vec::new();
    let mut folders = vec![(folder.to_owned(), String::new())];
    while let Some((folder, prefix)) = folders.pop() {
        let entries = fs::read_dir(&folder).map_err(|source| unreadable(&folder, source))?;
        for entry in entries {
            let source = entry.map_err(|source| unreadable(&folder, source))?.path();
            let name = source.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let path = format!("{prefix}{name}");
            if source.is_dir() {
                folders.push((source, format!("{path}/")));
                continue;
            }
            let digest = File::open(&source).and_then(|mut file| Checksum::sha256_of(&mut file));
            let (size, sha256) = digest.map_err(|error| unreadable(&source, error))?;
            found.push(Upload { path, source, size, sha256, is_large: false });
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

fn unreadable(path: &Path, source: io::Error) -> HubError {
    HubError::Write { path: path.to_owned(), source }
}
