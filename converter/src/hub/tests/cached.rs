//! Caches as other programs leave them, and a hub that is away.

use std::os::unix::fs::symlink;

use super::*;

/// A scene whose cache has the model.
fn cached() -> (Scene, PathBuf) {
    let scene = Scene::new();
    let folder = scene.fetch("org/model").unwrap();
    (scene, folder)
}

fn cache_of(scene: &Scene) -> PathBuf {
    scene.folder.path().join("cache/models--org--model")
}

/// Puts files in the place of links, and takes away all else, as programs do on file systems without
/// links.
fn place(scene: &Scene, folder: &Path) {
    for (name, bytes) in scene.server.needed() {
        fs::remove_file(folder.join(&name)).unwrap();
        fs::write(folder.join(&name), bytes).unwrap();
    }
    fs::remove_dir_all(cache_of(scene).join("blobs")).unwrap();
    fs::remove_dir_all(cache_of(scene).join(".verified")).unwrap();
}

fn offline(scene: &Scene) -> Hub {
    Hub::new(HubOptions { offline: true, ..scene.options() }, Arc::new(|_| {})).unwrap()
}

fn find(hub: &Hub, name: &str) -> Result<PathBuf, HubError> {
    hub.fetch(&hub.find(&Scene::name(name), &Selection::WHOLE)?)
}

#[test]
fn a_cache_without_links_is_read_with_and_without_the_hub() {
    let (scene, folder) = cached();
    place(&scene, &folder);
    assert_eq!(find(&offline(&scene), "org/model").unwrap(), folder);
    let before = scene.server.bytes_sent();
    assert_eq!(scene.fetch("org/model").unwrap(), folder);
    assert!(scene.server.bytes_sent() - before < 10_000, "answers of the API alone");
    assert!(fs::symlink_metadata(folder.join("model-1.safetensors")).unwrap().is_file());
    scene.check_files(&folder);
    // What the hub states is compared, also with files that are no links.
    let mut bytes = scene.server.content("model-1.safetensors");
    bytes[9] ^= 1;
    fs::write(folder.join("model-1.safetensors"), bytes).unwrap();
    scene.check_files(&scene.fetch("org/model").unwrap());
}

#[test]
fn links_to_names_of_other_programs_are_followed() {
    let (scene, folder) = cached();
    place(&scene, &folder);
    let elsewhere = scene.folder.path().join("weights.bin");
    fs::rename(folder.join("model-1.safetensors"), &elsewhere).unwrap();
    symlink(&elsewhere, folder.join("model-1.safetensors")).unwrap();
    assert_eq!(find(&offline(&scene), "org/model").unwrap(), folder);
}

#[test]
fn without_a_reference_the_only_commit_is_meant() {
    let (scene, folder) = cached();
    fs::remove_dir_all(cache_of(&scene).join("refs")).unwrap();
    assert_eq!(find(&offline(&scene), "org/model").unwrap(), folder);
    let other = "89abcdef0123456789abcdef0123456789abcdef";
    fs::create_dir(cache_of(&scene).join("snapshots").join(other)).unwrap();
    let error = find(&offline(&scene), "org/model").unwrap_err().to_string();
    assert!(error.contains(&format!("org/model@{}", scene.server.commit())), "{error}");
    assert!(error.contains(other), "{error}");
    let named = format!("org/model@{}", scene.server.commit());
    assert_eq!(find(&offline(&scene), &named).unwrap(), folder);
}

#[test]
fn a_hub_that_is_away_is_not_needed_where_the_cache_has_everything() {
    let (scene, folder) = cached();
    scene.server.stop();
    let told = Arc::new(Mutex::new(Vec::new()));
    let events = Arc::clone(&told);
    let observe = move |event: &HubEvent| {
        if let HubEvent::Away { problem, commit } = event {
            events.lock().unwrap().push(format!("{problem} {commit}"));
        }
    };
    let hub = Hub::new(scene.options(), Arc::new(observe)).unwrap();
    assert_eq!(find(&hub, "org/model").unwrap(), folder);
    let told = told.lock().unwrap().clone();
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("tried 2 times") && told[0].contains(scene.server.commit()));
    // A file less, and the hub is needed.
    fs::remove_file(folder.join("model-2.safetensors")).unwrap();
    let error = find(&hub, "org/model").unwrap_err();
    assert!(error.is_away(), "{error}");
    let error = find(&offline(&scene), "org/model").unwrap_err().to_string();
    assert!(error.contains("model-2.safetensors") && error.contains("HF_HUB_OFFLINE"), "{error}");
}

#[test]
fn what_cannot_be_written_is_told_from_what_fails() {
    for (kind, expected) in [
        (std::io::ErrorKind::PermissionDenied, true),
        (std::io::ErrorKind::ReadOnlyFilesystem, true),
        (std::io::ErrorKind::StorageFull, false),
        (std::io::ErrorKind::NotFound, false),
    ] {
        assert_eq!(cache::is_read_only(&kind.into()), expected, "{kind}");
    }
}
