//! What is said of the links between ranks, once for each group that differs from the one before.

use shardpack_engine_api::{LinkReport, Transport};

use crate::progress::{say, size};

/// The links that were said last.
#[derive(Default)]
pub(super) struct ShownLinks(Vec<String>);

impl ShownLinks {
    /// Says how the ranks are linked, unless that was said already.
    pub(super) fn show(&mut self, links: &[LinkReport]) {
        // Measured speeds differ from group to group, and are said with the rest alone.
        let key =
            links.iter().map(|it| format!("{:?} {:?} {:?}", it.ranks, it.transport, it.declined));
        let key: Vec<String> = key.collect();
        if self.0 != key {
            for line in lines(links) {
                say(&format!("serve: {line}"));
            }
            self.0 = key;
        }
    }
}

/// The sentences; none where nothing but TCP was wanted.
fn lines(links: &[LinkReport]) -> Vec<String> {
    let rdma: Vec<&LinkReport> =
        links.iter().filter(|link| link.transport == Transport::Rdma).collect();
    let mut lines = Vec::new();
    let declined = links.iter().filter_map(|link| Some((link, link.declined.as_ref()?)));
    for (link, reason) in declined {
        let [low, high] = link.ranks;
        let instead = if link.transport == Transport::Tls { "TCP inside TLS" } else { "TCP" };
        lines.push(format!("warning: ranks {low} and {high} are linked by {instead}: {reason}"));
    }
    if rdma.is_empty() {
        return lines;
    }
    let which = if rdma.len() == links.len() {
        "all ranks are linked".to_owned()
    } else {
        let pairs: Vec<String> =
            rdma.iter().map(|link| format!("{}-{}", link.ranks[0], link.ranks[1])).collect();
        format!("the pairs {} are linked", pairs.join(", "))
    };
    let slowest = rdma.iter().filter_map(|link| link.latency_us).max_by(f64::total_cmp);
    let narrowest = rdma.iter().filter_map(|link| link.bytes_per_second).min_by(f64::total_cmp);
    let speed = match (slowest, narrowest) {
        (Some(latency), Some(bytes)) => format!(" ({latency:.1} µs, {}/s)", size(bytes as u64)),
        _ => String::new(),
    };
    lines.push(format!(
        "{which} by RDMA{speed}; it is not encrypted, and --require-encryption refuses it"
    ));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(ranks: [u32; 2], transport: Transport, declined: Option<&str>) -> LinkReport {
        let declined = declined.map(str::to_owned);
        let (latency_us, bytes_per_second) = (Some(9.5), Some(5_368_709_120.0));
        LinkReport { ranks, transport, declined, latency_us, bytes_per_second }
    }

    #[test]
    fn a_pair_without_rdma_is_named_with_its_reason() {
        let links = [
            link([0, 1], Transport::Rdma, None),
            link([0, 2], Transport::Tls, Some("rank 2 has no RDMA device")),
            link([1, 2], Transport::Rdma, None),
        ];
        assert_eq!(
            lines(&links),
            [
                "warning: ranks 0 and 2 are linked by TCP inside TLS: rank 2 has no RDMA device",
                "the pairs 0-1, 1-2 are linked by RDMA (9.5 µs, 5.00 GiB/s); it is not encrypted, and \
                 --require-encryption refuses it",
            ]
        );
        assert!(lines(&links[..1])[0].starts_with("all ranks are linked by RDMA (9.5 µs"));
    }

    #[test]
    fn nothing_is_said_of_tcp_that_was_wanted() {
        assert_eq!(lines(&[link([0, 1], Transport::Tcp, None)]), [""; 0]);
        assert_eq!(lines(&[]), [""; 0]);
    }
}
