//! The system management controller of Macs, as bytes: packets of 80 bytes that ask for keys of
//! four letters. Nothing here is of one system; `macos` carries the packets.
//!
//! Apple does not document it. The layout and the keys are those that open-source monitors of
//! Apple silicon read: `PSTR` is the power of the whole machine, `Tp…` and `Te…` are temperatures
//! of processor cores, `Tg…` of the GPU. What a machine does not have is absent.

#![cfg_attr(not(target_os = "macos"), allow(dead_code, reason = "tested everywhere, used on one"))]

use crate::plausible;

/// Bytes of a packet, either way.
pub(crate) const PACKET: usize = 80;
/// Most keys that are looked at; machines have two to three thousand.
const KEYS_MAX: u32 = 10_000;
/// Most temperatures that are read each time.
const TEMPERATURES_MAX: usize = 64;

const READ_VALUE: u8 = 5;
const READ_KEY: u8 = 8;
const READ_KIND: u8 = 9;

/// Where fields stand in a packet.
mod at {
    pub(super) const KEY: usize = 0;
    pub(super) const SIZE: usize = 28;
    pub(super) const KIND: usize = 32;
    pub(super) const RESULT: usize = 40;
    pub(super) const COMMAND: usize = 42;
    pub(super) const INDEX: usize = 44;
    pub(super) const VALUE: usize = 48;
}

/// Carries a packet to the controller and its answer back.
pub(crate) trait Port {
    /// The answer, or none if the system refused.
    fn call(&mut self, packet: &[u8; PACKET]) -> Option<[u8; PACKET]>;
}

/// A key and what its value is like.
#[derive(Clone, Copy)]
struct Key {
    name: [u8; 4],
    size: u32,
    kind: [u8; 4],
}

/// The keys of one machine that are read.
pub(crate) struct Controller<P> {
    port: P,
    power: Option<Key>,
    temperatures: Vec<Key>,
}

impl<P: Port> Controller<P> {
    /// Looks through the keys once, which takes some milliseconds.
    pub(crate) fn new(mut port: P) -> Self {
        let power = kind(&mut port, *b"PSTR");
        let count = kind(&mut port, *b"#KEY").and_then(|key| raw(&mut port, key));
        // The one number that is stored with its high byte first.
        let count =
            count.map_or(0, |value| u32::from_be_bytes([value[0], value[1], value[2], value[3]]));
        let mut temperatures = Vec::new();
        for index in 0..count.min(KEYS_MAX) {
            let Some(name) = name(&mut port, index) else { continue };
            if matches!(&name[..2], b"Tp" | b"Te" | b"Tg")
                && temperatures.len() < TEMPERATURES_MAX
                && let Some(key) = kind(&mut port, name)
            {
                temperatures.push(key);
            }
        }
        Self { port, power, temperatures }
    }

    /// Watts of the machine.
    pub(crate) fn power(&mut self) -> Option<f64> {
        let watts = number(&mut self.port, self.power?)?;
        (0.0..10_000.0).contains(&watts).then_some(watts)
    }

    /// Degrees Celsius of the hottest sensor.
    pub(crate) fn temperature(&mut self) -> Option<f64> {
        let port = &mut self.port;
        let degrees = self.temperatures.iter().filter_map(|key| number(port, *key));
        degrees.filter(|at| plausible(*at)).reduce(f64::max)
    }
}

/// Packets are structures of the C language on machines whose low byte comes first.
fn put(packet: &mut [u8; PACKET], at: usize, value: u32) {
    packet[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn get(packet: &[u8; PACKET], at: usize) -> [u8; 4] {
    [packet[at], packet[at + 1], packet[at + 2], packet[at + 3]]
}

/// Names are numbers whose high byte is the first letter.
fn ask(
    port: &mut impl Port,
    command: u8,
    name: [u8; 4],
    size: u32,
    index: u32,
) -> Option<[u8; PACKET]> {
    let mut packet = [0; PACKET];
    put(&mut packet, at::KEY, u32::from_be_bytes(name));
    put(&mut packet, at::SIZE, size);
    packet[at::COMMAND] = command;
    put(&mut packet, at::INDEX, index);
    port.call(&packet).filter(|answer| answer[at::RESULT] == 0)
}

fn name(port: &mut impl Port, index: u32) -> Option<[u8; 4]> {
    let answer = ask(port, READ_KEY, [0; 4], 0, index)?;
    Some(u32::from_le_bytes(get(&answer, at::KEY)).to_be_bytes())
}

fn kind(port: &mut impl Port, name: [u8; 4]) -> Option<Key> {
    let answer = ask(port, READ_KIND, name, 0, 0)?;
    let size = u32::from_le_bytes(get(&answer, at::SIZE));
    let kind = u32::from_le_bytes(get(&answer, at::KIND)).to_be_bytes();
    (1..=32).contains(&size).then_some(Key { name, size, kind })
}

fn raw(port: &mut impl Port, key: Key) -> Option<[u8; 4]> {
    Some(get(&ask(port, READ_VALUE, key.name, key.size, 0)?, at::VALUE))
}

/// A value as a number: floats as Apple silicon has them, and the fixed points of older Macs.
fn number(port: &mut impl Port, key: Key) -> Option<f64> {
    let bytes = raw(port, key)?;
    match (&key.kind, key.size) {
        (b"flt ", 4) => Some(f64::from(f32::from_le_bytes(bytes))),
        (b"sp78", 2) => Some(f64::from(i16::from_be_bytes([bytes[0], bytes[1]])) / 256.0),
        (b"sp96", 2) => Some(f64::from(i16::from_be_bytes([bytes[0], bytes[1]])) / 64.0),
        _ => None,
    }
    .filter(|number| number.is_finite())
}

#[cfg(test)]
mod tests;
