//! What is fuzzed: per parser one function that feeds it and checks what it promises of whatever
//! it accepts. The fuzzer runs them on inputs it makes up, and the end-to-end tests on the
//! committed corpora.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Cursor, Read, Write},
    sync::{OnceLock, mpsc::sync_channel},
};

use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use shardpack_chat::{
    sandbox::wire::{Frame, Reply, Request},
    text::TokenTable,
};
use shardpack_cluster::probe_messages;
use shardpack_collectives::frame::{self as group_frame, HEADER_BYTES, Notice};
use shardpack_containers::{
    Importance,
    container::{self, TensorInfo},
    gguf, pickle,
    stored::{self, Documents, Logical, StoredConfig},
    tokenizer::{self, MAX_TOKENS, TokenizerError},
};
use shardpack_converter::Source;
use shardpack_engine::loading::{WeightStream, WeightStreams, send_package};
use shardpack_formats::{
    RulePack, SourceTensor, config_for_package,
    expr::{self, Expr, Scope},
    resolve,
};
use shardpack_identity::{SignedMandate, probe_membership};
use shardpack_manifests::{Manifest, PackageSet, canonical, manifest::FORMAT};
use shardpack_quantize::Dtype;
use shardpack_transfer::{
    protocol::{ChunkMap, Receiver, ReceiverAction, SharedMap, frame as transfer_frame},
    release::SignedRelease,
    ticket::SignedTicket,
};
use tempfile::TempDir;

/// A parser's test: panics when something is wrong.
type Target = fn(&[u8]);

/// Every target by its name, which is also that of its corpus.
pub(crate) const TARGETS: &[(&str, Target)] = &[
    ("cluster", cluster),
    ("collectives", collectives),
    ("container", container),
    ("expression", expression),
    ("gguf", gguf),
    ("imatrix", imatrix),
    ("manifest", manifest),
    ("membership", membership),
    ("model", model),
    ("pickle", pickle),
    ("quantization", quantization),
    ("records", records),
    ("rules", rules),
    ("sandbox", sandbox),
    ("sentencepiece", sentencepiece),
    ("set", set),
    ("source", source),
    ("tekken", tekken),
    ("tiktoken", tiktoken),
    ("transfer", transfer),
    ("weights", weights),
];

/// A model small enough to be resolved for every input: `{"config": …, "tensors": {name:
/// [dtype, shape]}}`.
const SMALL_MODEL: &[u8] = include_bytes!("../corpus/model/llama.json");

/// A safetensors file's header.
fn container(data: &[u8]) {
    let Ok(tensors) = container::parse(data) else { return };
    let mut end = 0;
    for tensor in &tensors {
        assert!(tensor.offset >= end, "{} overlaps the one before", tensor.name);
        end = tensor.offset.checked_add(tensor.size).expect("ends lie inside the file");
        let elements: u64 = tensor.shape.iter().product();
        assert_eq!(elements * tensor.dtype.size_bytes() as u64, tensor.size, "{}", tensor.name);
    }
    assert!(end <= data.len() as u64, "a tensor lies beyond the end of the file");
}

/// A configuration and tensors through the rules.
fn model(data: &[u8]) {
    let Some((config, tensors)) = parse_model(data) else { return };
    let Ok(normalised) = resolve(&config, &tensors, &RulePack::builtin()) else { return };
    let kept = normalised.tensors.iter().map(|tensor| tensor.sources.len()).sum::<usize>();
    let ignored = normalised.ignored.len() + usize::from(normalised.tied_duplicate.is_some());
    assert_eq!(kept + ignored, tensors.len(), "every tensor is accounted for once");
    let spec: Value = canonical::to_string(&normalised.spec)
        .map(|text| serde_json::from_str(&text).expect("canonical text is JSON"))
        .expect("an architecture has a canonical form");
    assert_eq!(serde_json::from_value(spec).ok(), Some(normalised.spec.clone()));
    // What goes into a package says the same as what came in.
    let packaged = config_for_package(&config, &normalised, None);
    let again = resolve(&packaged, &tensors, &RulePack::builtin());
    assert_eq!(again.map(|again| again.spec).ok(), Some(normalised.spec), "{packaged}");
}

/// A model folder: `config.json`, the index and one weight file, parted by the byte 0xff, which
/// no text has.
fn source(data: &[u8]) {
    let mut parts = data.splitn(3, |byte| *byte == 0xff);
    let folder = tempfile::tempdir().expect("a folder can be made");
    for name in ["config.json", "model.safetensors.index.json", "model.safetensors"] {
        if let Some(part) = parts.next() {
            fs::write(folder.path().join(name), part).expect("a file can be written");
        }
    }
    let Ok(source) = Source::open(folder.path()) else { return };
    for tensor in source.tensors() {
        let bytes = source.read_tensor(&tensor.name).expect("what was described can be read");
        let bytes = bytes.expect("listed tensors are held");
        assert_eq!(bytes.len() as u64, tensor.size);
    }
}

/// A rule file, also applied to a model.
fn rules(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    let Ok(pack) = RulePack::parse(text) else { return };
    let (mut config, tensors) = parse_model(SMALL_MODEL).expect("the small model is one");
    let model_types: Vec<String> = pack.model_types().map(str::to_owned).collect();
    let packs = [pack];
    for model_type in model_types {
        config["model_type"] = model_type.into();
        // Any answer will do, but for a panic.
        let _ = resolve(&config, &tensors, &packs);
    }
}

/// An expression of a rule file.
fn expression(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    let Ok(parsed) = Expr::parse(text) else { return };
    assert_eq!(parsed.text(), text);
    let mut scope = Scope::new();
    for (name, json) in
        [("a", "3"), ("b", "-0.5"), ("c", "null"), ("d", "[1, 'x', true]"), ("e", r#"{"f": [2]}"#)]
    {
        let json = serde_json::from_str(&json.replace('\'', "\"")).expect("written above");
        scope.set(name, expr::Value::from_json(&json).expect("written above"));
    }
    scope.set("L", expr::Value::Int(7));
    if let Ok(expr::Value::Float(value)) = parsed.evaluate(&scope) {
        assert!(value.is_finite(), "{text} is {value}");
    }
}

/// An importance file.
fn imatrix(data: &[u8]) {
    let Ok(importance) = Importance::parse(data) else { return };
    for (module, columns) in &importance.columns {
        assert!(!columns.is_empty() && columns.len() <= data.len() / 4, "{module}");
        assert!(columns.iter().all(|column| column.is_finite() && *column > 0.0), "{module}");
        let found = importance.of(module, 1, columns.len() as u64);
        assert_eq!(found.ok().flatten(), Some(columns.as_slice()));
    }
}

/// A sentencepiece model.
fn sentencepiece(data: &[u8]) {
    tokenizer_document(&tokenizer::sentencepiece(data, &Value::Null));
}

/// Mistral's tokenizer.
fn tekken(data: &[u8]) {
    tokenizer_document(&tokenizer::tekken(data));
}

/// Ranks of tiktoken, as Kimi has them.
fn tiktoken(data: &[u8]) {
    let config = serde_json::json!({ "tokenizer_class": "TikTokenTokenizer" });
    tokenizer_document(&tokenizer::kimi(data, &config));
}

/// Every id of a converted tokenizer is one token's.
fn tokenizer_document(document: &Result<Value, TokenizerError>) {
    let Ok(document) = document else { return };
    let vocab = &document["model"]["vocab"];
    let count = vocab.as_object().map(serde_json::Map::len);
    let count = count.or_else(|| vocab.as_array().map(Vec::len)).expect("a vocabulary");
    assert!(0 < count && count <= MAX_TOKENS);
    if let Some(vocab) = vocab.as_object() {
        let mut ids: Vec<u64> = vocab.values().filter_map(Value::as_u64).collect();
        ids.sort_unstable();
        assert!(ids.iter().enumerate().all(|(index, id)| *id == index as u64));
    }
    let merges = document["model"]["merges"].as_array().map_or(0, Vec::len);
    assert!(merges <= count * tokenizer::MAX_TOKEN_BYTES);
}

/// A manifest, and the map of chunks after its end (a newline).
fn manifest(data: &[u8]) {
    let end = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (document, rest) = data.split_at(end);
    let Ok(manifest) = Manifest::parse_any_format(document) else { return };
    for tensor in &manifest.tensors {
        let file = manifest.file(&tensor.file).expect("tensors lie in listed files");
        assert!(tensor.offset + tensor.size <= file.size, "{}", tensor.name);
    }
    if manifest.format != FORMAT {
        return;
    }
    // Integers of 2^53 and more have no canonical form.
    if let Ok(text) = canonical::to_string(&manifest) {
        assert_eq!(Manifest::parse(text.as_bytes()).ok().as_ref(), Some(&manifest));
    }
    if let Ok(map) = ChunkMap::parse(&manifest, rest.get(1..).unwrap_or_default()) {
        assert_eq!(map.to_bytes(), rest.get(1..).unwrap_or_default());
    }
}

/// A package set's document.
fn set(data: &[u8]) {
    let _ = PackageSet::parse_any_format(data);
    let Ok(set) = PackageSet::parse(data) else { return };
    if let Ok(text) = canonical::to_string(&set) {
        assert_eq!(PackageSet::parse(text.as_bytes()).ok(), Some(set));
    }
}

/// A connection's bytes, as a node takes them.
fn transfer(data: &[u8]) {
    let mut stream = Cursor::new(data);
    let (mut receiver, mut offered) = (Receiver::new(), None);
    while let Ok(message) = transfer_frame::read(&mut stream, |_| ()) {
        let mut written = Vec::new();
        transfer_frame::write(&mut written, &message).expect("memory takes every byte");
        let again = transfer_frame::read(&mut Cursor::new(&written), |_| ());
        assert_eq!(again.ok().as_ref(), Some(&message));
        match receiver.handle(message) {
            Err(_) => return,
            Ok(ReceiverAction::Stage(incoming)) => {
                let held = SharedMap::new(ChunkMap::empty(&incoming.manifest));
                offered = Some((incoming.manifest, held.clone()));
                receiver.staged(held, u64::MAX, 0);
            }
            // As if another connection had offered it.
            Ok(ReceiverAction::Join(_)) => match &offered {
                Some((manifest, held)) => drop(receiver.joined(manifest.clone(), held.clone())),
                None => return,
            },
            Ok(ReceiverAction::Store { file, chunk, .. }) => {
                receiver.stored(file, chunk);
            }
            Ok(ReceiverAction::Seal) => {
                receiver.sealed();
            }
            Ok(
                ReceiverAction::Reply(_)
                | ReceiverAction::Activate(_)
                | ReceiverAction::List
                | ReceiverAction::StartRank(_)
                | ReceiverAction::Operate(_)
                | ReceiverAction::Fetch(_)
                | ReceiverAction::Put { .. },
            ) => {}
        }
    }
}

/// Records that a controller signs. What is read is the same when it is written and read again.
fn records(data: &[u8]) {
    fn round_trip<T: Serialize + DeserializeOwned + PartialEq>(data: &[u8]) {
        let Ok(record) = serde_json::from_slice::<T>(data) else { return };
        let written = serde_json::to_vec(&record).expect("a record is JSON");
        assert!(serde_json::from_slice::<T>(&written).is_ok_and(|again| again == record));
    }
    round_trip::<SignedRelease>(data);
    round_trip::<SignedTicket>(data);
    round_trip::<SignedMandate>(data);
}

/// The other side of a connection on which a package comes: it has said all that it will say.
struct Said {
    input: Cursor<Vec<u8>>,
    answered: usize,
}

impl Read for Said {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.input.read(into)
    }
}

impl Write for Said {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.answered += from.len();
        Ok(from.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Bytes as answers to a rank that asks for a package, and as requests to who has one.
fn weights(data: &[u8]) {
    static PACKAGE: OnceLock<(TempDir, usize)> = OnceLock::new();
    let (package, manifest_bytes) = PACKAGE.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let manifest = include_bytes!("../corpus/manifest/small");
        fs::write(folder.path().join("manifest.json"), manifest).expect("a file can be written");
        (folder, manifest.len())
    });
    let said = || Said { input: Cursor::new(data.to_vec()), answered: 0 };
    let (arrive, arriving) = sync_channel::<Box<dyn WeightStream>>(1);
    arrive.send(Box::new(said())).expect("there is room for one");
    drop(arrive);
    // A manifest is checked before it is returned.
    let _ = WeightStreams::new(arriving, 1).manifest();
    let mut asked = said();
    let _ = send_package(package.path(), &mut asked);
    // An answer is the manifest or a sentence, since there are no files.
    let most = (data.len() / 9 + 1) * (9 + (*manifest_bytes).max(4 << 10));
    assert!(asked.answered <= most, "{} bytes for {}", asked.answered, data.len());
}

/// What fronts and ranks say to each other, and where ranks say they are.
fn cluster(data: &[u8]) {
    probe_messages(data);
}

/// What nodes and controllers say about membership, tokens, keys and certificates.
fn membership(data: &[u8]) {
    probe_membership(data);
}

/// A frame between ranks, and the end of a group within it.
fn collectives(data: &[u8]) {
    shardpack_collectives::rdma::probe_messages(data);
    let Some((head, payload)) = data.split_first_chunk::<HEADER_BYTES>() else { return };
    let Ok(header) = group_frame::Header::parse(head) else { return };
    assert_eq!(&header.encode(), head);
    assert!(!header.to_string().is_empty());
    if let Ok(notice) = Notice::parse(payload) {
        let frame = notice.frame(header.from, header.epoch);
        let again = Notice::parse(&frame[HEADER_BYTES..]).expect("what is written is read");
        assert_eq!(again.blamed, notice.blamed);
        assert!(notice.reason.starts_with(&again.reason), "a reason is only cut");
    }
}

/// A GGUF file: its header, its model, what its blocks stand for, the documents in its keys.
fn gguf(data: &[u8]) {
    let Ok(header) = gguf::parse(data) else { return };
    let size = data.len() as u64;
    assert_eq!(gguf::parse_start(data, size).as_ref(), Ok(&header), "whole or in parts");
    for tensor in &header.tensors {
        assert!(tensor.offset + tensor.size <= size, "{} lies beyond the end", tensor.name);
    }
    // Any answer will do, but for a panic.
    let _ = gguf::tokenizer::tokenizer(&header);
    let _ = gguf::tokenizer::tokenizer_config(&header);
    let Ok(model) = gguf::Model::new(&header) else { return };
    let Ok(parts) = model.parts(&header.tensors) else { return };
    let factors = Some(vec![1.0, 8.0]);
    let frequencies =
        gguf::config::Frequencies { all: factors.clone(), long: factors.clone(), short: factors };
    let _ = gguf::config::config(&model, &parts, &frequencies);
    let Ok(grouped) = stored::group_gguf(&parts) else { return };
    let infos: BTreeMap<String, TensorInfo> =
        parts.iter().map(|part| (part.stored.clone(), part.info())).collect();
    for tensor in &grouped.tensors {
        check_rows(tensor, &infos, data);
    }
}

/// Some rows of a tensor lie inside its parts, and can be decoded from them.
fn check_rows(tensor: &Logical, infos: &BTreeMap<String, TensorInfo>, file: &[u8]) {
    let rows = tensor.row_count();
    if rows == 0 || tensor.width() == 0 {
        return;
    }
    for range in [0..1, rows - 1..rows, rows / 2..(rows / 2 + 3).min(rows)] {
        let windows = tensor.windows(range.clone());
        let mut parts = Vec::new();
        for (part, window) in tensor.parts.iter().zip(&windows) {
            let info = &infos[part];
            let end = window.rows.end.checked_mul(window.row_bytes);
            let inside = end.is_some_and(|end| end <= info.size) || window.size_bytes() == 0;
            assert!(inside, "{window:?} of {info:?}, {range:?} of {}", tensor.name);
            let data = file.get(info.offset as usize..).and_then(|f| f.get(..info.size as usize));
            if let Some(data) = data {
                let rows = window.rows.clone().map(|row| (row * window.row_bytes) as usize);
                let columns = window.columns.start as usize..window.columns.end as usize;
                let row = |at: usize| data[at..][columns.clone()].to_vec();
                parts.push(rows.flat_map(row).collect::<Vec<u8>>());
            }
        }
        if tensor.is_decoded() && parts.len() == windows.len() {
            let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            let mut out = Vec::new();
            if tensor.decode(range.clone(), &parts, &mut out).is_ok() {
                assert_eq!(out.len() as u64, (range.end - range.start) * tensor.width());
            }
        }
    }
}

/// A file of `torch.save`: as an archive, and as a pickle alone.
fn pickle(data: &[u8]) {
    if let Ok(saved) = pickle::parse(data) {
        for tensor in &saved {
            let size = tensor.storage_len.saturating_mul(tensor.dtype.size_bytes() as u64);
            if let Ok(placed) = pickle::place(tensor, 0, size) {
                assert!(placed.stored.offset + placed.stored.size <= size, "{}", tensor.name);
            }
        }
    }
    let size = data.len() as u64;
    let tail = &data[data.len() - data.len().min(pickle::zip::TAIL_BYTES as usize)..];
    let Ok(directory) = pickle::zip::find_directory(tail, size) else { return };
    let bytes = &data[directory.offset as usize..][..directory.size as usize];
    for entry in pickle::zip::parse_directory(bytes, directory).unwrap_or_default() {
        let Some(local) = data.get(entry.offset.min(size) as usize..) else { continue };
        if let Ok(start) = pickle::zip::data_offset(&entry, local, size) {
            assert!(start + entry.size <= size, "{} lies beyond the end", entry.name);
        }
    }
}

/// A frame of a sandbox, as either side reads it, and its body as tokens and as a table of them.
fn sandbox(data: &[u8]) {
    let table = |bytes: &[u8]| {
        if let Ok(table) = TokenTable::parse(bytes) {
            assert_eq!(table.encode(), bytes);
        }
    };
    table(data);
    let Ok(frame) = Frame::read(&mut &data[..]) else { return };
    let mut written = Vec::new();
    frame.write(&mut written).expect("what was read is within its limits");
    assert!(data.starts_with(&written));
    if let Ok(request) = frame.message::<Request<'_>>() {
        let again = Frame::new(&request, Vec::new()).expect("a request that was read");
        assert_eq!(again.message::<Request<'_>>().expect("a request that was written"), request);
    }
    if let Ok(reply) = frame.owned::<Reply>() {
        let again = Frame::new(&reply, Vec::new()).expect("a reply that was read");
        assert_eq!(again.owned::<Reply>().expect("a reply that was written"), reply);
    }
    let _ = frame.tokens();
    table(&frame.body);
}

/// A description of quantized weights and the stored tensors: `{"config": …, "tensors": {name:
/// [dtype, shape]}}`.
fn quantization(data: &[u8]) {
    let Some((config, tensors)) = parse_model(data) else { return };
    let documents =
        Documents { config: Some(&config), hf_quant_config: None, quantize_config: None };
    let Ok(description) = StoredConfig::parse(documents) else { return };
    let info = |tensor: SourceTensor| {
        // What a file's header could hold: its bytes can be counted.
        let element = tensor.dtype.size_bytes() as u64;
        let size = tensor.shape.iter().try_fold(element, |size, dim| size.checked_mul(*dim))?;
        let SourceTensor { name, dtype, shape } = tensor;
        Some(TensorInfo { name, dtype, shape, offset: 0, size })
    };
    let infos: Vec<TensorInfo> = tensors.into_iter().filter_map(info).collect();
    let Ok(grouped) = stored::group(description.as_ref(), &infos, &BTreeMap::new()) else { return };
    let infos: BTreeMap<String, TensorInfo> =
        infos.into_iter().map(|info| (info.name.clone(), info)).collect();
    let mut seen: Vec<&String> = grouped.tensors.iter().flat_map(|t| &t.parts).collect();
    seen.extend(grouped.dropped.iter().map(|(name, _)| name));
    seen.sort_unstable();
    // One stored tensor may hold the parts of two.
    seen.dedup();
    assert!(seen.into_iter().eq(infos.keys()), "every stored tensor is accounted for");
    for tensor in &grouped.tensors {
        check_rows(tensor, &infos, &[]);
    }
}

fn parse_model(data: &[u8]) -> Option<(Value, Vec<SourceTensor>)> {
    let mut model: Value = serde_json::from_slice(data).ok()?;
    let tensors: BTreeMap<String, (Dtype, Vec<u64>)> =
        serde_json::from_value(model.get_mut("tensors")?.take()).ok()?;
    let tensors = tensors
        .into_iter()
        .map(|(name, (dtype, shape))| SourceTensor { name, dtype, shape })
        .collect();
    Some((model.get_mut("config")?.take(), tensors))
}
