//! A program that a controller sends to nodes: what it is ([`ProgramOffer`]), signed by the controller,
//! and for what machine its file says that it is made ([`Platform`]).

use std::{
    fmt,
    fs::File,
    io::Read as _,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};
use shardpack_identity::{Credentials, Signature};
use shardpack_manifests::{Digest, digest::ChunkHasher};

/// Version of the offer.
const FORMAT: u32 = 1;

/// What the signature says it is for.
const PURPOSE: &str = "node program";

/// Largest program: unoptimised builds with their debug information have a tenth.
const MAX_PROGRAM_BYTES: u64 = 4 << 30;

/// Most bytes of an offer's text.
const MAX_TEXT_BYTES: usize = 4 << 10;

/// Bytes of a piece; as base64 it fits a message.
pub(crate) const PIECE_BYTES: usize = 512 << 10;

/// Operations on a node's program.
pub(crate) const STATE: &str = "program.state";
pub(crate) const BEGIN: &str = "program.begin";
pub(crate) const PIECE: &str = "program.piece";
pub(crate) const INSTALL: &str = "program.install";
pub(crate) const CONFIRM: &str = "program.confirm";

/// For what machine a program is made, by its file's first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Platform {
    format: &'static str,
    machine: u32,
    /// Class and byte order of ELF.
    kind: [u8; 2],
}

impl Platform {
    /// Bytes that are looked at.
    const HEAD_BYTES: u64 = 64;

    /// Of the file at `path`, if it is a program.
    pub(crate) fn of(path: &Path) -> anyhow::Result<Self> {
        let mut head = Vec::new();
        let read =
            File::open(path).and_then(|file| file.take(Self::HEAD_BYTES).read_to_end(&mut head));
        read.with_context(|| format!("could not read {}", path.display()))?;
        Self::parse(&head).context("neither an ELF nor a Mach-O program")
    }

    /// ELF (`elf.h`) and Mach-O of 64 bits (`mach-o/loader.h`).
    fn parse(head: &[u8]) -> Option<Self> {
        if head.starts_with(b"\x7fELF") {
            let kind = [*head.get(4)?, *head.get(5)?];
            let machine: [u8; 2] = head.get(18..20)?.try_into().ok()?;
            let machine = match kind[1] {
                1 => u16::from_le_bytes(machine),
                _ => u16::from_be_bytes(machine),
            };
            return Some(Self { format: "ELF", machine: machine.into(), kind });
        }
        if head.starts_with(&0xfeed_facf_u32.to_le_bytes()) {
            let machine = u32::from_le_bytes(head.get(4..8)?.try_into().ok()?);
            return Some(Self { format: "Mach-O", machine, kind: [2, 1] });
        }
        None
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = match (self.format, self.machine) {
            ("ELF", 62) | ("Mach-O", 0x0100_0007) => "x86-64",
            ("ELF", 183) | ("Mach-O", 0x0100_000c) => "64-bit Arm",
            _ => return write!(f, "{} for machine {:#x}", self.format, self.machine),
        };
        write!(f, "{} for {machine}", self.format)
    }
}

/// What a controller offers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProgramOffer {
    format: u32,
    /// BLAKE3 of the file.
    pub digest: Digest,
    pub size_bytes: u64,
    /// When it was made, in seconds since 1970.
    time: u64,
}

/// An offer as it is sent: its text, and the controller's signature of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SignedOffer {
    offer: String,
    signature: Signature,
}

impl SignedOffer {
    /// Of a program, by a controller.
    pub(crate) fn sign(
        digest: Digest,
        size_bytes: u64,
        signer: &Credentials,
    ) -> anyhow::Result<Self> {
        let offer = ProgramOffer { format: FORMAT, digest, size_bytes, time: now() };
        let offer = serde_json::to_string(&offer)?;
        let signature = Signature::sign(signer, PURPOSE, offer.as_bytes())?;
        Ok(Self { offer, signature })
    }

    /// What is offered, if a controller of the cluster of `credentials` signed it.
    pub(crate) fn verify(&self, credentials: &Credentials) -> anyhow::Result<ProgramOffer> {
        let refused = "the offer of a program is refused";
        ensure!(self.offer.len() <= MAX_TEXT_BYTES, "{refused}: {} bytes", self.offer.len());
        self.signature
            .verify(credentials, PURPOSE, self.offer.as_bytes(), now())
            .context(refused)?;
        let offer: ProgramOffer = serde_json::from_str(&self.offer).context(refused)?;
        ensure!(offer.format == FORMAT, "{refused}: format {}, expected {FORMAT}", offer.format);
        ensure!(
            (1..=MAX_PROGRAM_BYTES).contains(&offer.size_bytes),
            "{refused}: {} bytes are no program's size",
            offer.size_bytes
        );
        Ok(offer)
    }
}

/// Digest and size of a file.
pub(crate) fn digest_of(path: &Path) -> anyhow::Result<(Digest, u64)> {
    let shown = || format!("could not read {}", path.display());
    let mut file = File::open(path).with_context(shown)?;
    let (mut hasher, mut size_bytes) = (ChunkHasher::new(), 0);
    let mut piece = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut piece).with_context(shown)?;
        if count == 0 {
            return Ok((hasher.finish().digest, size_bytes));
        }
        hasher.update(&piece[..count]);
        size_bytes += count as u64;
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardpack_identity::{Authority, Role, Validity};

    #[test]
    fn a_file_says_for_what_machine_it_is() {
        let own = Platform::of(&std::env::current_exe().unwrap()).unwrap();
        let elf = |machine: u16| {
            let mut head = b"\x7fELF\x02\x01\x01".to_vec();
            head.resize(64, 0);
            head[18..20].copy_from_slice(&machine.to_le_bytes());
            Platform::parse(&head).unwrap()
        };
        assert_eq!(elf(62).to_string(), "ELF for x86-64");
        assert_eq!(elf(183).to_string(), "ELF for 64-bit Arm");
        assert_eq!(elf(243).to_string(), "ELF for machine 0xf3");
        assert_ne!(elf(62), elf(183));
        assert!(own != elf(243));
        let mac = Platform::parse(b"\xcf\xfa\xed\xfe\x0c\0\0\x01").unwrap();
        assert_eq!(mac.to_string(), "Mach-O for 64-bit Arm");
        for none in [&b"#!/bin/sh\n"[..], b"", b"\x7fELF", b"\xcf\xfa\xed\xfe", b"MZ"] {
            assert_eq!(Platform::parse(none), None, "{none:?}");
        }
    }

    #[test]
    fn only_a_controllers_offer_is_taken_and_only_as_it_was_made() {
        let authority = Authority::generate("c").unwrap();
        let issue = |role| authority.issue(role, Validity::from_now()).unwrap();
        let (controller, node) = (issue(Role::Controller), issue(Role::Node));
        let digest = Digest::of(b"program");
        let signed = SignedOffer::sign(digest, 7, &controller).unwrap();
        assert_eq!(signed.verify(&node).unwrap().digest, digest);
        SignedOffer::sign(digest, 7, &node).unwrap().verify(&node).unwrap_err();
        let bent = signed.offer.replace(":7", ":8");
        SignedOffer { offer: bent, ..signed.clone() }.verify(&node).unwrap_err();
        SignedOffer::sign(digest, 0, &controller).unwrap().verify(&node).unwrap_err();
    }
}
