//! Against a server on this machine that speaks the hub's protocol, with faults on order: each
//! ends in the right file or a clear error, and a later run recovers.

mod cached;
mod server;
mod tls;

use std::{
    fs,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tempfile::TempDir;

use super::*;
use server::{Fault, Server};

static WAITED: Mutex<Vec<Duration>> = Mutex::new(Vec::new());

/// So many times that nobody tries as often.
const ALWAYS: u32 = 1000;

/// Waiting costs no time in tests.
fn no_wait(pause: Duration, _: &dyn Fn() -> bool) {
    WAITED.lock().unwrap().push(pause);
}

struct Scene {
    server: Server,
    folder: TempDir,
}

impl Scene {
    fn new() -> Self {
        Self { server: Server::start(), folder: tempfile::tempdir().unwrap() }
    }

    fn options(&self) -> HubOptions {
        HubOptions {
            endpoint: self.server.address(),
            token: Some("secret".to_owned()),
            silence: Duration::from_secs(2),
            wait: no_wait,
            ..HubOptions::new(self.folder.path().join("cache"))
        }
    }

    fn hub(&self) -> Hub {
        Hub::new(self.options(), Arc::new(|_| {})).unwrap()
    }

    fn name(text: &str) -> ModelName {
        text.parse().unwrap()
    }

    /// Finds and fetches; the folder of the files.
    fn fetch(&self, name: &str) -> Result<PathBuf, HubError> {
        let hub = self.hub();
        let snapshot = hub.find(&Self::name(name), &Selection::WHOLE)?;
        hub.fetch(&snapshot)
    }

    fn check_files(&self, folder: &Path) {
        for (name, bytes) in self.server.needed() {
            assert!(fs::read(folder.join(&name)).unwrap() == bytes, "{name}");
        }
    }

    /// With this fault the files are right all the same.
    fn survives(fault: Fault) {
        let scene = Self::new();
        scene.server.fault("model-2.safetensors", fault);
        let folder = scene.fetch("org/model").unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        scene.check_files(&folder);
    }

    /// With this fault there is an error with these words, nothing wrong has a name, and a run
    /// without the fault ends well.
    fn refuses(fault: Fault, words: &[&str]) {
        let scene = Self::new();
        scene.server.fault("model-2.safetensors", fault);
        let error = scene.fetch("org/model").err().unwrap_or_else(|| panic!("{fault:?}"));
        for word in words {
            assert!(error.to_string().contains(word), "{fault:?}: {word:?} in {error}");
        }
        let cache = scene.folder.path().join("cache/models--org--model");
        let commit = scene.server.commit();
        assert!(!cache.join("snapshots").join(commit).join("model-2.safetensors").exists());
        scene.server.heal();
        scene.check_files(&scene.fetch("org/model").unwrap());
    }
}

#[test]
fn a_model_is_found_pinned_and_laid_out_as_everybody_does() {
    let scene = Scene::new();
    let hub = scene.hub();
    let snapshot = hub.find(&Scene::name("org/model@release/1"), &Selection::WHOLE).unwrap();
    assert_eq!(snapshot.commit, scene.server.commit());
    let names: Vec<&str> = snapshot.files.iter().map(|file| file.path.as_str()).collect();
    let needed: Vec<String> = scene.server.needed().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, needed, "no pictures, no second copies");
    let folder = hub.fetch(&snapshot).unwrap();
    scene.check_files(&folder);
    let cache = scene.folder.path().join("cache/models--org--model");
    assert_eq!(folder, cache.join("snapshots").join(scene.server.commit()));
    let reference = fs::read_to_string(cache.join("refs/release/1")).unwrap();
    assert_eq!(reference, scene.server.commit());
    let blob = fs::read_link(folder.join("model-1.safetensors")).unwrap();
    let digest = snapshot.origin().sha256["model-1.safetensors"];
    assert_eq!(blob, Path::new("../../blobs").join(shardpack_formats::hex::encode(&digest)));
    assert_eq!(snapshot.origin().repo.as_deref(), Some("org/model"));
}

#[test]
fn what_is_there_is_not_asked_for_again_and_works_offline() {
    let scene = Scene::new();
    let folder = scene.fetch("org/model").unwrap();
    let before = scene.server.bytes_sent();
    scene.fetch("org/model").unwrap();
    assert!(scene.server.bytes_sent() - before < 10_000, "answers of the API alone");
    scene.server.stop();
    let options = HubOptions { offline: true, ..scene.options() };
    let hub = Hub::new(options, Arc::new(|_| {})).unwrap();
    let snapshot = hub.find(&Scene::name("org/model"), &Selection::WHOLE).unwrap();
    assert_eq!(hub.fetch(&snapshot).unwrap(), folder);
    let error = hub.find(&Scene::name("org/other"), &Selection::WHOLE).unwrap_err().to_string();
    assert!(error.contains("HF_HUB_OFFLINE"), "{error}");
}

#[test]
fn bytes_that_rotted_in_the_cache_are_fetched_anew() {
    let scene = Scene::new();
    let folder = scene.fetch("org/model").unwrap();
    // Another program's download: right size, wrong bytes, no mark of ours.
    let blob = fs::canonicalize(folder.join("model-1.safetensors")).unwrap();
    let mut bytes = fs::read(&blob).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&blob, bytes).unwrap();
    let marks = scene.folder.path().join("cache/models--org--model/.verified");
    fs::remove_dir_all(marks).unwrap();
    scene.check_files(&scene.fetch("org/model").unwrap());
}

#[test]
fn faults_that_pass_end_in_the_right_file() {
    Scene::survives(Fault::Truncate { times: 3 });
    Scene::survives(Fault::Reset { times: 2 });
    Scene::survives(Fault::Stall { times: 1 });
    Scene::survives(Fault::Status { status: 503, times: 3, retry_after: None });
    Scene::survives(Fault::Status { status: 429, times: 2, retry_after: Some(7) });
    Scene::survives(Fault::IgnoreRange);
    Scene::survives(Fault::WrongBytes { times: 1 });
    Scene::survives(Fault::Redirect);
    assert!(WAITED.lock().unwrap().contains(&Duration::from_secs(7)), "Retry-After is kept");
}

#[test]
fn faults_that_stay_end_in_a_clear_error() {
    Scene::refuses(Fault::WrongBytes { times: ALWAYS }, &["SHA-256", "model-2.safetensors"]);
    Scene::refuses(
        Fault::Status { status: 503, times: ALWAYS, retry_after: None },
        &["503", "6 times"],
    );
    Scene::refuses(
        Fault::Status { status: 429, times: ALWAYS, retry_after: Some(4000) },
        &["4000 s"],
    );
    Scene::refuses(Fault::Truncate { times: ALWAYS }, &["times", "kept"]);
    Scene::refuses(Fault::WrongRange, &["asked for bytes"]);
    Scene::refuses(Fault::InsecureRedirect, &["only https"]);
}

#[test]
fn an_interrupted_download_goes_on_where_it_was() {
    let scene = Scene::new();
    scene.server.fault("model-2.safetensors", Fault::Truncate { times: 1000 });
    scene.fetch("org/model").unwrap_err();
    let blobs = scene.folder.path().join("cache/models--org--model/blobs");
    let part = fs::read_dir(blobs).unwrap().map(|entry| entry.unwrap().path());
    let part = part.filter(|path| path.extension().is_some_and(|end| end == "part"));
    let kept = fs::metadata(part.last().unwrap()).unwrap().len();
    assert!(kept > 0);
    scene.server.heal();
    let before = scene.server.bytes_sent();
    scene.check_files(&scene.fetch("org/model").unwrap());
    let rest = scene.server.size("model-2.safetensors") - kept;
    assert!(scene.server.bytes_sent() - before < rest + 10_000, "only the rest was sent");
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    let scene = Scene::new();
    scene.server.fault("model-2.safetensors", Fault::Redirect);
    scene.fetch("org/model").unwrap();
    let (own, other) = scene.server.tokens_seen();
    assert!(own > 0, "the hub sees who asks");
    assert_eq!(other, 0, "the store of large files does not, whatever it redirects to");
}

#[test]
fn who_may_not_is_told_what_to_do() {
    let scene = Scene::new();
    let message = |name: &str| scene.fetch(name).unwrap_err().to_string();
    for (name, words) in [
        ("org/gated", &["gated", "accept its terms", "HF_TOKEN"][..]),
        ("org/missing", &["no such model", "private"]),
        ("org/model@nowhere", &["no revision", "nowhere"]),
        ("org/empty", &["no config.json"]),
        ("org/pickles", &["pytorch_model.bin", "no .safetensors", "--allow-pickle"]),
    ] {
        let message = message(name);
        for word in words {
            assert!(message.contains(word), "{name}: {word:?} in {message}");
        }
    }
}

#[test]
fn who_was_let_in_later_gets_the_files() {
    let scene = Scene::new();
    let error = scene.fetch("org/gated").unwrap_err().to_string();
    assert!(error.contains("accept its terms"), "{error}");
    scene.server.let_in();
    scene.check_files(&scene.fetch("org/gated").unwrap());
}

#[test]
fn listings_and_small_files_get_over_faults_too() {
    for fault in [
        Fault::Truncate { times: 2 },
        Fault::Reset { times: 2 },
        Fault::WrongBytes { times: 1 },
        Fault::Status { status: 503, times: 2, retry_after: None },
        Fault::IgnoreRange,
    ] {
        for file in ["config.json", "model.safetensors.index.json"] {
            let scene = Scene::new();
            scene.server.fault(file, fault);
            let folder = scene.fetch("org/model");
            scene.check_files(&folder.unwrap_or_else(|error| panic!("{file} {fault:?}: {error}")));
        }
    }
}

#[test]
fn names_are_checked_before_anything_is_sent() {
    for good in ["a/b", "a-b/c.d_e", "a/b@main", "a/b@refs/pr/1"] {
        assert!(good.parse::<ModelName>().is_ok(), "{good}");
    }
    for bad in ["a", "a/b/c", "../b", "a/..", "a/b@", "a/b@../x", "a/b@x//y", "a b/c", "/b", "a/-"]
    {
        assert!(bad.parse::<ModelName>().is_err(), "{bad}");
    }
    let insecure = HubOptions {
        endpoint: "http://hub.example".to_owned(),
        ..HubOptions::new(PathBuf::from("cache"))
    };
    let error = Hub::new(insecure, Arc::new(|_| {})).err().unwrap().to_string();
    assert!(error.contains("only https"), "{error}");
}

/// The weight files of the scene's model, read from afar.
fn remote(scene: &Scene) -> (Vec<RemoteFile>, PathBuf) {
    let hub = Arc::new(scene.hub());
    let snapshot = hub.find(&Scene::name("org/model"), &Selection::WHOLE).unwrap();
    let spool = scene.folder.path().join("spool");
    let weights = snapshot.files.iter().filter(|file| file.is_weights());
    // Pieces of one chunk, so that the second file has three.
    let piece = shardpack_manifests::digest::CHUNK_BYTES;
    let file = |file| RemoteFile::new(Arc::clone(&hub), &snapshot, file, Some(&spool), piece);
    (weights.map(file).collect(), spool)
}

fn pieces(spool: &Path) -> usize {
    fs::read_dir(spool).map_or(0, Iterator::count)
}

#[test]
fn weights_are_read_from_afar_checked_and_dropped() {
    let scene = Scene::new();
    let (files, spool) = remote(&scene);
    let second = files.iter().find(|file| file.name() == "model-2.safetensors").unwrap();
    let expected = scene.server.content("model-2.safetensors");
    let size = expected.len() as u64;
    let mut header = vec![0; 50];
    second.read_header(&mut header, 8).unwrap();
    assert_eq!(header, expected[8..58]);
    assert_eq!(pieces(&spool), 0, "a header costs no file");
    second.expect(0..size);
    second.expect(1000..1100);
    let mut bytes = vec![0; 100];
    let before = scene.server.bytes_sent();
    // The last piece first, and over a border.
    second.read(&mut bytes, size - 100).unwrap();
    assert_eq!(bytes, expected[size as usize - 100..]);
    second.read(&mut bytes, (4 << 20) - 50).unwrap();
    assert_eq!(bytes, expected[(4 << 20) - 50..(4 << 20) + 50]);
    second.read(&mut bytes, 1000).unwrap();
    assert_eq!(bytes, expected[1000..1100]);
    assert!(pieces(&spool) > 0);
    second.done(1000..1100);
    assert!(pieces(&spool) > 0, "something is still to be made of it");
    second.done(0..size);
    let chunks = second.verify().unwrap();
    let digest = shardpack_manifests::digest::merge_chunks(&chunks, size);
    assert_eq!(digest, shardpack_manifests::Digest::of(&expected));
    assert_eq!(pieces(&spool), 0, "nothing needs it any more");
    assert_eq!(scene.server.bytes_sent() - before, size, "every byte came once");
    // Read again all the same, it is what it was.
    second.read(&mut bytes, 1000).unwrap();
    assert_eq!(bytes, expected[1000..1100]);
    drop(files);
    assert_eq!(pieces(&spool), 0);
}

#[test]
fn broken_connections_from_afar_go_on_where_they_were() {
    for fault in [
        Fault::Truncate { times: 3 },
        Fault::Reset { times: 2 },
        Fault::Status { status: 503, times: 3, retry_after: None },
        Fault::Status { status: 429, times: 2, retry_after: Some(9) },
        Fault::Redirect,
    ] {
        let scene = Scene::new();
        let (files, _) = remote(&scene);
        scene.server.fault("model-2.safetensors", fault);
        let second = files.iter().find(|file| file.name() == "model-2.safetensors").unwrap();
        let size = second.size();
        let chunks = second.verify().unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        let expected = shardpack_manifests::Digest::of(&scene.server.content(second.name()));
        assert_eq!(shardpack_manifests::digest::merge_chunks(&chunks, size), expected);
    }
    assert!(WAITED.lock().unwrap().contains(&Duration::from_secs(9)), "Retry-After is kept");
    for (fault, word) in [
        (Fault::IgnoreRange, "does not support range requests"),
        (Fault::WrongRange, "asked for bytes"),
        (Fault::InsecureRedirect, "only https"),
        (Fault::Truncate { times: ALWAYS }, "times"),
        (Fault::WrongBytes { times: ALWAYS }, "SHA-256"),
        (Fault::Status { status: 503, times: ALWAYS, retry_after: None }, "503"),
        (Fault::Status { status: 429, times: ALWAYS, retry_after: Some(4000) }, "4000 s"),
    ] {
        let scene = Scene::new();
        let (files, _) = remote(&scene);
        scene.server.fault("model-2.safetensors", fault);
        let second = files.iter().find(|file| file.name() == "model-2.safetensors").unwrap();
        let error = second.verify().unwrap_err().to_string();
        assert!(error.contains(word), "{fault:?}: {error}");
        // A later run finds nothing of it in its way.
        drop(files);
        scene.server.heal();
        let (files, spool) = remote(&scene);
        let second = files.iter().find(|file| file.name() == "model-2.safetensors").unwrap();
        let chunks = second.verify().unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        let expected = shardpack_manifests::Digest::of(&scene.server.content(second.name()));
        assert_eq!(shardpack_manifests::digest::merge_chunks(&chunks, second.size()), expected);
        assert_eq!(pieces(&spool), 0, "{fault:?}");
    }
}

#[test]
fn wrong_bytes_from_afar_never_verify() {
    let scene = Scene::new();
    scene.server.fault("model-1.safetensors", Fault::WrongBytes { times: 1000 });
    let (files, _) = remote(&scene);
    let first = files.iter().find(|file| file.name() == "model-1.safetensors").unwrap();
    let error = first.verify().unwrap_err().to_string();
    assert!(error.contains("SHA-256"), "{error}");
    // Bytes that change after they were hashed are seen too.
    let scene = Scene::new();
    let (files, _) = remote(&scene);
    let first = files.iter().find(|file| file.name() == "model-1.safetensors").unwrap();
    first.verify().unwrap();
    scene.server.fault("model-1.safetensors", Fault::WrongBytes { times: 1000 });
    let error = first.read(&mut [0; 10], 0).unwrap_err().to_string();
    assert!(error.contains("other bytes than before"), "{error}");
}

#[test]
fn a_header_that_is_not_the_file_s_never_verifies() {
    let scene = Scene::new();
    let (files, _) = remote(&scene);
    let first = files.iter().find(|file| file.name() == "model-1.safetensors").unwrap();
    scene.server.fault("model-1.safetensors", Fault::WrongBytes { times: 1 });
    first.read_header(&mut [0; 8], 0).unwrap();
    let error = first.verify().unwrap_err().to_string();
    assert!(error.contains("another header"), "{error}");
}

#[test]
fn certificates_are_checked_against_the_given_authorities() {
    let scene = Scene::new();
    let gate = tls::gate(&scene.server.address());
    let fetch = |authorities: Option<&str>| {
        let options = HubOptions {
            endpoint: gate.clone(),
            authorities: authorities.map(tls::file),
            ..scene.options()
        };
        let hub = Hub::new(options, Arc::new(|_| {}))?;
        let snapshot = hub.find(&Scene::name("org/model@release/1"), &Selection::WHOLE)?;
        hub.fetch(&snapshot)
    };
    scene.check_files(&fetch(Some("authority.pem")).unwrap());
    for authorities in [None, Some("server.pem")] {
        let error = fetch(authorities).unwrap_err().to_string();
        assert!(error.contains("certificate"), "{error}");
    }
    let error = fetch(Some("make.sh")).unwrap_err().to_string();
    assert!(error.contains("holds no certificate"), "{error}");
}

#[test]
fn figures_of_progress_add_up() {
    let scene = Scene::new();
    scene.server.fault("model-2.safetensors", Fault::WrongBytes { times: 1 });
    let arrived = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&arrived);
    let observe = Arc::new(move |event: &HubEvent| match event {
        HubEvent::Arrived(bytes) => _ = seen.fetch_add(*bytes, Ordering::Relaxed),
        HubEvent::Lost(bytes) => _ = seen.fetch_sub(*bytes, Ordering::Relaxed),
        _ => {}
    });
    let hub = Hub::new(scene.options(), observe).unwrap();
    let snapshot = hub.find(&Scene::name("org/model"), &Selection::WHOLE).unwrap();
    hub.fetch(&snapshot).unwrap();
    let total: u64 = snapshot.files.iter().map(|file| file.size).sum();
    // The index was read on the way to finding the others.
    let index = snapshot.files.iter().find(|file| file.path == INDEX).unwrap().size;
    assert_eq!(arrived.load(Ordering::Relaxed), total + index);
}
