//! Converts a model of SmolLM2-135M's sizes and random weights from a folder (out of memory, then
//! from disk), and from a hub on this machine over loopback, kept in the cache and not kept: what the
//! hub's client costs. Shares are of the folder's speed from disk. The hub's files are in memory.
//!
//! `cargo run --release -p shardpack-converter --example hub_speed [ROUNDS]`
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a measurement")]

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Instant,
};

use serde_json::{Map, Value, json};
use sha1::{Digest as _, Sha1};
use sha2::Sha256;
use shardpack_converter::{
    ConvertOptions, Pickles, Plan, Source, convert,
    hub::{Hub, HubOptions, Selection},
};
use shardpack_formats::hex;

const COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";
const HIDDEN: usize = 576;
const INTERMEDIATE: usize = 1536;
const LAYERS: usize = 30;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const VOCABULARY: usize = 49152;

fn main() {
    let rounds = std::env::args().nth(1).map_or(3, |rounds| rounds.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    write_model(&model);
    let files = fs::read_dir(&model).unwrap().map(|file| file.unwrap().path());
    let files: Arc<Vec<(PathBuf, Value)>> =
        Arc::new(files.map(|path| (path.clone(), entry(&path))).collect());
    let endpoint = start(files);
    println!("{:>10}  {:>10}  {:>11}  {:>11}", "in memory", "from disk", "hub", "not kept");
    for round in 0..rounds {
        let at = |name: &str| folder.path().join(format!("{name}-{round}"));
        let open = || Source::open_part(&model, None, Pickles::Refuse).unwrap();
        let cached = seconds(&at("cached"), open);
        forget(&model.join("model.safetensors"));
        let local = seconds(&at("local"), open);
        let hub = |cache: &Path| {
            let options =
                HubOptions { endpoint: endpoint.clone(), ..HubOptions::new(cache.into()) };
            Arc::new(Hub::new(options, Arc::new(|_| ())).unwrap())
        };
        let name = "org/model".parse().unwrap();
        let kept = seconds(&at("kept"), || {
            let hub = hub(&at("cache"));
            let snapshot = hub.find(&name, &Selection::WHOLE).unwrap();
            Source::open_snapshot(&hub, &snapshot).unwrap()
        });
        let passing = seconds(&at("passing"), || {
            let hub = hub(&at("other-cache"));
            let snapshot = hub.find(&name, &Selection::WHOLE).unwrap();
            Source::open_remote(&hub, &snapshot, Some(&at("spool"))).unwrap()
        });
        let share = |seconds: f64| format!("{seconds:.2} s {:.2}", local / seconds);
        let (kept, passing) = (share(kept), share(passing));
        println!("{cached:>8.2} s  {local:>8.2} s  {kept:>11}  {passing:>11}");
    }
}

/// Seconds that a conversion takes, opening included.
fn seconds(output: &Path, open: impl Fn() -> Source) -> f64 {
    let started = Instant::now();
    let source = open();
    let plan = Plan::new(&source, ConvertOptions::new(output.to_owned(), 1)).unwrap();
    convert(&source, &plan, &|_| ()).unwrap();
    started.elapsed().as_secs_f64()
}

/// Drops a file from the page cache, so that it is read from disk; where that cannot be said, it stays.
fn forget(path: &Path) {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    #[cfg(target_os = "linux")]
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

fn write_model(folder: &Path) {
    fs::create_dir(folder).unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100_000,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let kv = HIDDEN / HEADS * KV_HEADS;
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCABULARY, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for layer in 0..LAYERS {
        for (name, shape) in [
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![HIDDEN, HIDDEN]),
            ("self_attn.k_proj", vec![kv, HIDDEN]),
            ("self_attn.v_proj", vec![kv, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, HIDDEN]),
            ("mlp.gate_proj", vec![INTERMEDIATE, HIDDEN]),
            ("mlp.up_proj", vec![INTERMEDIATE, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, INTERMEDIATE]),
        ] {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    let (mut header, mut end) = (Map::new(), 0);
    for (name, shape) in &tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        let tensor = json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, end] });
        header.insert(name.clone(), tensor);
    }
    let header = Value::from(header).to_string();
    let mut file = std::io::BufWriter::new(File::create(folder.join("model.safetensors")).unwrap());
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let mut state = 1u64;
    for _ in 0..end / 2 {
        // Between 1/64 and 1/32, of either sign: no number is out of the ordinary.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let bits = (state >> 48) as u16;
        file.write_all(&(bits & 0x807f | 0x3c80).to_le_bytes()).unwrap();
    }
    file.flush().unwrap();
}

/// What the hub's list says of a file.
fn entry(path: &Path) -> Value {
    let bytes = fs::read(path).unwrap();
    let mut sha1 = Sha1::new();
    sha1.update(format!("blob {}\0", bytes.len()));
    sha1.update(&bytes);
    let oid: [u8; 20] = sha1.finalize().into();
    let name = path.file_name().unwrap().to_str().unwrap();
    let mut entry =
        json!({ "type": "file", "path": name, "size": bytes.len(), "oid": hex::encode(&oid) });
    if name.ends_with(".safetensors") {
        let sha256: [u8; 32] = Sha256::digest(&bytes).into();
        entry["lfs"] = json!({ "oid": hex::encode(&sha256), "size": bytes.len() });
    }
    entry
}

/// Starts a hub with one model; returns its address.
fn start(files: Arc<Vec<(PathBuf, Value)>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming() {
            let files = Arc::clone(&files);
            // A client that has gone away is none of our concern.
            thread::spawn(move || while answer(stream.as_ref().unwrap(), &files).is_ok() {});
        }
    });
    address
}

/// Answers one request of a connection; an error ends it.
fn answer(mut stream: &TcpStream, files: &[(PathBuf, Value)]) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let (mut first, mut range) = (String::new(), None);
    reader.read_line(&mut first)?;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let line = line.trim_end().to_ascii_lowercase();
        if let Some((start, last)) =
            line.strip_prefix("range: bytes=").and_then(|range| range.split_once('-'))
        {
            range = Some((start.parse::<u64>().unwrap(), last.parse::<u64>().unwrap()));
        }
        if line.is_empty() {
            break;
        }
    }
    let path = first.split(' ').nth(1).unwrap_or_default();
    let json = if path == "/api/models/org/model/revision/main" {
        Some(json!({ "id": "org/model", "sha": COMMIT }))
    } else if path.contains("/tree/") {
        Some(files.iter().map(|(_, entry)| entry.clone()).collect())
    } else {
        None
    };
    if let Some(json) = json {
        let body = json.to_string();
        return write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    }
    let found = files.iter().find(|(_, entry)| path.ends_with(entry["path"].as_str().unwrap()));
    let Some((file, entry)) = found else {
        return write!(stream, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
    };
    let size = entry["size"].as_u64().unwrap();
    let (status, (start, last)) =
        range.map_or(("200 OK", (0, size - 1)), |range| ("206 Partial Content", range));
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Range: bytes {start}-{last}/{size}\r\nContent-Length: {}\r\n\r\n",
        last + 1 - start
    )?;
    if first.starts_with("HEAD ") {
        return Ok(());
    }
    let (file, mut buffer, mut at) = (File::open(file)?, vec![0; 1 << 20], start);
    while at <= last {
        let wanted = buffer.len().min((last + 1 - at) as usize);
        let count = file.read_at(&mut buffer[..wanted], at)?;
        stream.write_all(&buffer[..count])?;
        at += count as u64;
    }
    Ok(())
}
