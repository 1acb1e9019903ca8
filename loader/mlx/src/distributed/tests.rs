//! Host files as MLX writes them, and what is refused in them.

use std::path::Path;

use super::*;

/// What `mlx.distributed_config` writes for three Macs, each with a cable to each other.
const MESH: &str = r#"{
  "backend": "jaccl",
  "envs": [],
  "hosts": [
    {"ssh": "a.local", "ips": ["10.0.0.1"], "rdma": [null, "rdma_en5", "rdma_en4"]},
    {"ssh": "b.local", "ips": ["10.0.0.2"], "rdma": ["rdma_en3", null, "rdma_en5"]},
    {"ssh": "c.local", "ips": ["10.0.0.3"], "rdma": ["rdma_en4", ["rdma_en2"], null]}
  ]
}"#;

fn parse(text: &str) -> HostFile {
    HostFile::parse(text.as_bytes()).unwrap()
}

fn environment(distributed: &Distributed, rank: u32) -> (Vec<(&'static str, String)>, String) {
    let folder = tempfile::tempdir().unwrap();
    let mut variables = distributed.environment(rank, folder.path()).unwrap();
    let mut content = String::new();
    for (_, value) in &mut variables {
        if let Some(name) = Path::new(value).strip_prefix(folder.path()).ok().map(Path::to_owned) {
            content = fs::read_to_string(&value).unwrap();
            *value = name.display().to_string();
        }
    }
    (variables, content)
}

#[test]
fn a_mesh_is_told_as_jaccl_reads_it() {
    let jaccl = parse(MESH).jaccl(FIRST_PORT).unwrap();
    jaccl.check(3).unwrap();
    let (variables, matrix) = environment(&jaccl, 2);
    let expected = [
        ("MLX_RANK", "2"),
        ("MLX_IBV_DEVICES", "devices.json"),
        ("MLX_JACCL_COORDINATOR", "10.0.0.1:32323"),
    ];
    assert_eq!(variables, expected.map(|(name, value)| (name, value.to_owned())));
    assert_eq!(
        matrix,
        r#"[[null,"rdma_en5","rdma_en4"],["rdma_en3",null,"rdma_en5"],["rdma_en4","rdma_en2",null]]"#
    );
}

#[test]
fn ranks_in_a_circle_with_two_cables_are_a_ring() {
    let hosts = r#"[
        {"ips": ["10.0.0.1"], "rdma": [null, ["a", "b"], null, ["c", "d"]]},
        {"ips": ["10.0.0.2"], "rdma": [["a", "b"], null, ["c", "d"], null]},
        {"ips": ["10.0.0.3"], "rdma": [null, ["a", "b"], null, ["c", "d"]]},
        {"ips": ["10.0.0.4"], "rdma": [["a", "b"], null, ["c", "d"], null]}
    ]"#;
    let jaccl = parse(hosts).jaccl(FIRST_PORT).unwrap();
    jaccl.check(4).unwrap();
    let (variables, matrix) = environment(&jaccl, 0);
    assert_eq!(variables.last(), Some(&("MLX_JACCL_RING", "1".to_owned())));
    assert!(matrix.starts_with(r#"[[null,["a","b"],null,["c","d"]],"#), "{matrix}");
    let uneven = hosts.replacen(r#"["a", "b"]"#, r#"["a"]"#, 1);
    let error = parse(&uneven).jaccl(FIRST_PORT).unwrap().check(4).unwrap_err().to_string();
    assert!(error.starts_with("rank 0 has no RDMA device to rank 3"), "{error}");
}

#[test]
fn a_host_file_for_jaccl_ring_is_a_ring_and_nothing_else() {
    let file = |backend: &str| parse(&MESH.replacen("\"jaccl\"", backend, 1));
    let jaccl = file("\"jaccl-ring\"").jaccl(FIRST_PORT).unwrap();
    jaccl.check(3).unwrap();
    let (variables, _) = environment(&jaccl, 0);
    assert_eq!(variables.last(), Some(&("MLX_JACCL_RING", "1".to_owned())));
    let json = serde_json::to_string(&jaccl).unwrap();
    assert_eq!(serde_json::from_str::<Distributed>(&json).unwrap(), jaccl);
    // Without the wish, the same devices are a mesh, and older nodes understand what is sent.
    let mesh = file("\"\"").jaccl(FIRST_PORT).unwrap();
    assert!(!environment(&mesh, 0).0.iter().any(|(name, _)| *name == "MLX_JACCL_RING"));
    assert!(!serde_json::to_string(&mesh).unwrap().contains("prefer_ring"));
    refused(file("\"ring\"").jaccl(1), 3, "use --collectives ring");
    let uneven =
        MESH.replacen("\"jaccl\"", "\"jaccl-ring\"", 1).replacen("\"rdma_en4\"", "null", 1);
    refused(parse(&uneven).jaccl(1), 3, "rank 0 has 0 cables to rank 2 where rank 0 has 1");
    let error = HostFile::parse(MESH.replacen("\"jaccl\"", "\"mpi\"", 1).as_bytes()).unwrap_err();
    assert!(error.contains("\"mpi\" is none of"), "{error}");
    let bare = MESH.replace("[\"10.0.0.2\"]", "[]");
    refused(parse(&bare).ring(1), 3, "use --collectives jaccl");
}

#[test]
fn two_cables_between_two_ranks_are_both_used() {
    let hosts = |cables: &str| {
        let row = |ip: &str, rdma: String| format!("{{\"ips\": [\"{ip}\"], \"rdma\": [{rdma}]}}");
        let (first, second) = (format!("null, {cables}"), format!("{cables}, null"));
        parse(&format!("[{}, {}]", row("10.0.0.1", first), row("10.0.0.2", second)))
    };
    let two = hosts("[\"rdma_en2\", \"rdma_en3\"]").jaccl(1).unwrap();
    two.check(2).unwrap();
    assert_eq!(environment(&two, 0).0.last().unwrap().0, "MLX_JACCL_RING");
    assert_eq!(two.unused_cables(), 0);
    let one = hosts("\"rdma_en2\"").jaccl(1).unwrap();
    assert_eq!(environment(&one, 0).0.last().unwrap().0, "MLX_JACCL_COORDINATOR");
    let mesh = MESH.replacen("[\"rdma_en2\"]", "[\"rdma_en2\", \"rdma_en6\"]", 1);
    assert_eq!(parse(&mesh).jaccl(1).unwrap().unused_cables(), 1);
}

#[test]
fn a_ring_over_tcp_has_a_port_for_each_rank() {
    let ring = parse(MESH).ring(40_000).unwrap();
    ring.check(3).unwrap();
    let (variables, hosts) = environment(&ring, 1);
    let expected = [("MLX_RANK", "1"), ("MLX_HOSTFILE", "ring.json")];
    assert_eq!(variables, expected.map(|(name, value)| (name, value.to_owned())));
    assert_eq!(hosts, r#"[["10.0.0.1:40000"],["10.0.0.2:40001"],["10.0.0.3:40002"]]"#);
    let travelled = serde_json::to_string(&ring).unwrap();
    assert_eq!(serde_json::from_str::<Distributed>(&travelled).unwrap(), ring);
}

#[track_caller]
fn refused(distributed: Result<Distributed, DistributedError>, ranks: usize, expected: &str) {
    let error = distributed.and_then(|it| it.check(ranks)).unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
}

#[test]
fn what_would_hang_is_refused_by_name() {
    let mesh = || parse(MESH);
    refused(mesh().ring(1), 2, "the host file has 3 hosts, and the set has 2 ranks");
    refused(mesh().jaccl(1), 4, "the host file has 3 hosts, and the set has 4 ranks");
    refused(mesh().ring(65_535), 3, "rank 1: there is no port 1 above 65535");
    refused(mesh().ring(0), 3, "10.0.0.1:0 is not a usable address");
    let with = |from: &str, to: &str| parse(&MESH.replacen(from, to, 1));
    refused(with("\"rdma_en5\"", "null").jaccl(1), 3, "rank 0 has no RDMA device to rank 1");
    refused(with("\"rdma_en5\"", "\"../en5\"").jaccl(1), 3, "\"../en5\" is not the name");
    refused(with("null, \"rdma_en5\"", "\"rdma_en5\"").jaccl(1), 3, "2 hosts");
    refused(with("10.0.0.1", "fe80::1").jaccl(1), 3, "not an IPv4 address");
    refused(with("\"10.0.0.1\"", "").jaccl(1), 3, "rank 0: has no address");
    let unnamed = MESH.replacen("\"jaccl\"", "\"\"", 1).replacen("\"10.0.0.2\"", "", 1);
    refused(parse(&unnamed).ring(1), 3, "rank 1: has no address");
    let ring = |second: &str| {
        let hosts = ["127.0.0.1:5", second, "127.0.0.1:7"];
        Ok(Distributed::Ring { hosts: hosts.map(|it| vec![it.parse().unwrap()]).to_vec() })
    };
    refused(ring("127.0.0.1:5"), 3, "rank 1: 127.0.0.1:5 is also another rank's");
    refused(ring("0.0.0.0:6"), 3, "rank 1: 0.0.0.0:6 is not a usable address");
}

#[test]
fn what_is_no_host_file_is_refused() {
    for bad in ["", "{}", "[]", "{\"hosts\": 3}", "[{\"ips\": [\"a.local\"]}]", "[{\"rdma\": [7]}]"]
    {
        HostFile::parse(bad.as_bytes()).unwrap_err();
    }
    let error = HostFile::read(Path::new("/does/not/exist")).unwrap_err();
    assert!(matches!(error, DistributedError::Read { .. }), "{error}");
}
