//! Downloads from a server of ours, over real connections: ranges, cut and silent connections,
//! answers that ignore a range, wrong bytes, redirects, a proxy.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use super::*;

const FILE: &str = "tiny_mlx-0.1-py3-none-any.whl";
const PAUSE: Duration = Duration::from_millis(1);
/// Long enough that only a connection that is silent for good is given up.
const SILENCE: Duration = Duration::from_secs(2);

/// An answer that ends before its first byte.
const NOTHING: Reply = Reply::Cut(0);

/// What a request asked for: path, or target of a tunnel, and the range.
type Asked = (String, Option<u64>);

/// What the server does with the n-th request for the file.
#[derive(Clone, Copy)]
enum Reply {
    /// What was asked for.
    Whole,
    /// So many bytes of it, then the end.
    Cut(usize),
    /// So many bytes of it, then nothing.
    Silence(usize),
    /// Everything from the beginning, whatever was asked for.
    NoRange,
    /// No answer but this status.
    Status(u16),
    /// Everything, with a byte changed.
    Changed,
    /// Half of the file, as if that were all.
    Short,
}

struct Server {
    url: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

fn content() -> Vec<u8> {
    (0..300_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn pinned() -> Pinned {
    Pinned {
        project: "tiny-mlx".to_owned(),
        file: FILE.to_owned(),
        sha256: Checksum::sha256_of(&mut content().as_slice()).unwrap().1.text(),
        size_bytes: content().len() as u64,
    }
}

/// An index whose page is JSON or HTML, and that gives the file as `replies` say, then whole.
fn serve(json: bool, replies: &'static [Reply]) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&asked);
    thread::spawn(move || {
        let mut files = 0;
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            let Some(request) = read_request(&stream) else { continue };
            noted.lock().unwrap().push(request.clone());
            answer(stream, &request, json, replies, &mut files);
        }
    });
    Server { url, asked }
}

fn read_request(stream: &TcpStream) -> Option<Asked> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let path = first.split(' ').nth(1)?.to_owned();
    let mut from = None;
    for line in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
        let line = line.to_ascii_lowercase();
        if let Some(range) = line.strip_prefix("range: bytes=") {
            from = range.split('-').next().and_then(|from| from.parse().ok());
        }
    }
    Some((path, from))
}

fn answer(
    mut stream: TcpStream,
    (path, from): &Asked,
    json: bool,
    replies: &[Reply],
    files: &mut usize,
) {
    let link = format!("../../moved/{FILE}#sha256=00");
    let page = if json {
        format!(r#"{{"files": [{{"filename": "{FILE}", "url": "{link}"}}]}}"#)
    } else {
        format!("<html><a href=\"{link}\">{FILE}</a></html>")
    };
    let head = |status: u16, length: usize, more: &str| {
        format!(
            "HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {length}\r\n{more}\r\n"
        )
    };
    if path.starts_with("/moved/") {
        let more = format!("Location: /files/{FILE}\r\n");
        let _ = stream.write_all(head(302, 0, &more).as_bytes());
    } else if !path.starts_with("/files/") {
        let _ = stream.write_all((head(200, page.len(), "") + &page).as_bytes());
    } else {
        let reply = replies.get(*files).copied().unwrap_or(Reply::Whole);
        *files += 1;
        let mut bytes = content();
        let from = from.filter(|_| !matches!(reply, Reply::NoRange)).map(|from| from as usize);
        match reply {
            Reply::Status(status) => {
                let _ = stream.write_all(head(status, 0, "").as_bytes());
                return;
            }
            Reply::Changed => bytes[1234] ^= 1,
            Reply::Short => bytes.truncate(150_000),
            _ => {}
        }
        let total = bytes.len();
        let body = &bytes[from.unwrap_or(0)..];
        let head = match from {
            Some(from) => {
                let range = format!("Content-Range: bytes {from}-{}/{total}\r\n", total - 1);
                head(206, body.len(), &range)
            }
            None => head(200, body.len(), ""),
        };
        let sent = match reply {
            Reply::Cut(count) | Reply::Silence(count) => &body[..count],
            _ => body,
        };
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(sent));
        if matches!(reply, Reply::Silence(_)) {
            // Until the other side gives up.
            thread::spawn(move || stream.read(&mut [0]));
        }
    }
}

fn options(url: &str) -> DownloadOptions {
    let index_url = format!("{url}/simple/");
    DownloadOptions { index_url, proxy: None, no_proxy: String::new(), authorities: None }
}

/// Downloads into `path`.
fn fetch(options: &DownloadOptions, path: &Path, pinned: &Pinned) -> Result<(), DownloadError> {
    let pace = Pace { silence: SILENCE, pause: PAUSE };
    download(pinned, options, pace, path, &mut |_| ())
}

/// Downloads through `replies`; returns where the requests for the file began.
fn ranges(json: bool, replies: &'static [Reply]) -> Vec<Option<u64>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("part");
    let server = serve(json, replies);
    fetch(&options(&server.url), &path, &pinned()).unwrap();
    assert_eq!(fs::read(path).unwrap(), content());
    let asked = server.asked.lock().unwrap();
    assert_eq!(asked[0].0, "/simple/tiny-mlx/");
    asked.iter().filter(|(path, _)| path.starts_with("/files/")).map(|(_, from)| *from).collect()
}

/// Downloads through `replies`, which fails; returns the error and what is left.
fn failure(replies: &'static [Reply]) -> (DownloadError, Option<usize>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("part");
    let server = serve(true, replies);
    let error = fetch(&options(&server.url), &path, &pinned()).unwrap_err();
    (error, fs::read(path).ok().map(|bytes| bytes.len()))
}

#[test]
fn a_file_is_found_and_fetched_through_a_redirect() {
    assert_eq!(ranges(true, &[]), [Some(0)]);
    assert_eq!(ranges(false, &[]), [Some(0)]);
}

#[test]
fn a_cut_or_silent_connection_is_taken_up() {
    assert_eq!(
        ranges(true, &[Reply::Cut(1000), Reply::Cut(500)]),
        [Some(0), Some(1000), Some(1500)]
    );
    assert_eq!(ranges(true, &[Reply::Silence(2000)]), [Some(0), Some(2000)]);
    let busy = [Reply::Status(503), Reply::Status(429)];
    assert_eq!(ranges(true, Vec::leak(busy.to_vec())), [Some(0), Some(0), Some(0)]);
}

#[test]
fn a_server_without_ranges_starts_over() {
    let replies = &[Reply::Cut(1000), Reply::NoRange];
    assert_eq!(ranges(true, replies), [Some(0), Some(1000)]);
    // 416: what is there is no beginning of what the server has.
    let replies = &[Reply::Cut(1000), Reply::Status(416)];
    assert_eq!(ranges(true, replies), [Some(0), Some(1000), Some(0)]);
}

#[test]
fn other_bytes_are_refused_and_leave_nothing() {
    // Fetched anew once, then given up.
    let (error, left) = failure(&[Reply::Changed, Reply::Changed]);
    assert!(matches!(&error, DownloadError::Http(HttpError::Content { .. })), "{error}");
    assert!(error.to_string().contains(&pinned().sha256), "{error}");
    assert_eq!(left, None);
    let (error, left) = failure(&[Reply::Cut(1000), Reply::Short]);
    assert!(matches!(&error, DownloadError::Http(HttpError::Length { .. })), "{error}");
    assert_eq!(left, None);
    let (error, left) = failure(&[Reply::Short]);
    assert!(error.to_string().contains("0 to 299999 of 300000"), "{error}");
    assert_eq!(left, None);
}

#[test]
fn a_network_that_fails_leaves_what_arrived() {
    let (error, left) = failure(&[Reply::Status(503); 6]);
    assert!(error.to_string().contains("the server answered 503 (tried 6 times)"), "{error}");
    assert_eq!(left, None);
    let replies = &[Reply::Cut(1000), NOTHING, NOTHING, NOTHING, NOTHING, NOTHING];
    let (error, left) = failure(replies);
    assert!(
        matches!(&error, DownloadError::Http(HttpError::Network { attempts: 6, .. })),
        "{error}"
    );
    assert_eq!(left, Some(1000));
    let (error, _) = failure(&[Reply::Status(403)]);
    assert!(
        matches!(&error, DownloadError::Http(HttpError::Status { status: 403, .. })),
        "{error}"
    );
}

#[test]
fn what_an_earlier_run_left_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("part");
    let server = serve(true, &[]);
    fs::write(&path, &content()[..2000]).unwrap();
    fetch(&options(&server.url), &path, &pinned()).unwrap();
    assert_eq!(server.asked.lock().unwrap().last().unwrap().1, Some(2000));
    assert_eq!(fs::read(&path).unwrap(), content());
    // Complete: nothing is asked.
    let nowhere = options("http://127.0.0.1:1");
    fetch(&nowhere, &path, &pinned()).unwrap();
    // Another download holds it.
    let held = File::open(&path).unwrap();
    held.lock().unwrap();
    let error = fetch(&nowhere, &path, &pinned()).unwrap_err();
    assert!(matches!(error, DownloadError::Busy(_)), "{error}");
    drop(held);
    // Of another file: found out, and fetched anew.
    fs::write(&path, vec![0; content().len()]).unwrap();
    fetch(&options(&server.url), &path, &pinned()).unwrap();
    assert_eq!(server.asked.lock().unwrap().last().unwrap().1, Some(0));
    assert_eq!(fs::read(&path).unwrap(), content());
}

#[test]
fn an_index_without_the_file_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(false, &[]);
    let other = Pinned { file: "tiny_mlx-0.2-py3-none-any.whl".to_owned(), ..pinned() };
    let path = folder.path().join("part");
    let error = fetch(&options(&server.url), &path, &other).unwrap_err();
    assert!(matches!(&error, DownloadError::Absent { .. }) && !path.exists(), "{error}");
}

/// A proxy that opens every tunnel to `target`; returns its address and what it was asked for.
fn proxy(target: String) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&asked);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut near = stream.unwrap();
            let Some(request) = read_request(&near) else { continue };
            noted.lock().unwrap().push(request);
            let mut far = TcpStream::connect(&target).unwrap();
            near.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").unwrap();
            let (mut reads, mut writes) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            thread::spawn(move || io::copy(&mut reads, &mut writes));
            thread::spawn(move || {
                let _ = io::copy(&mut far, &mut near);
                let _ = near.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    Server { url, asked }
}

#[test]
fn a_proxy_is_used_but_for_hosts_that_are_excepted() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(true, &[]);
    let proxy = proxy(server.url.trim_start_matches("http://").to_owned());
    // The name exists for the proxy alone.
    let mut options = options("http://index.invalid");
    options.proxy = Some(proxy.url.clone());
    fetch(&options, &folder.path().join("part"), &pinned()).unwrap();
    let asked = proxy.asked.lock().unwrap().clone();
    assert!(asked.iter().all(|(host, _)| host == "index.invalid:80"), "{asked:?}");
    assert!(!asked.is_empty());
    options.no_proxy = "invalid".to_owned();
    let error = fetch(&options, &folder.path().join("other"), &pinned()).unwrap_err();
    assert!(matches!(error, DownloadError::Http(HttpError::Network { .. })), "{error}");
    assert_eq!(proxy.asked.lock().unwrap().len(), asked.len());
}

#[test]
fn a_file_of_authorities_holds_certificates() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("authorities.pem");
    fs::write(&path, "none").unwrap();
    let options =
        DownloadOptions { authorities: Some(path.clone()), ..options("http://127.0.0.1:1") };
    let error = fetch(&options, &folder.path().join("part"), &pinned()).unwrap_err().to_string();
    assert!(error.contains("authorities.pem: it holds no certificate"), "{error}");
}
