//! A controller in memory that answers as the packets' layout says.

use super::*;

struct Memory(Vec<(&'static [u8; 4], &'static [u8; 4], Vec<u8>)>);

impl Port for Memory {
    fn call(&mut self, packet: &[u8; PACKET]) -> Option<[u8; PACKET]> {
        let mut answer = [0; PACKET];
        let key = u32::from_le_bytes(packet[0..4].try_into().unwrap()).to_be_bytes();
        let index = u32::from_le_bytes(packet[44..48].try_into().unwrap()) as usize;
        let found = match packet[42] {
            8 => self.0.get(index),
            _ => self.0.iter().find(|(name, ..)| **name == key),
        };
        // 132 is the controller's own word for a key that it does not have.
        let Some((name, kind, value)) = found else {
            answer[40] = 132;
            return Some(answer);
        };
        match packet[42] {
            5 => {
                assert_eq!(packet[28..32], (value.len() as u32).to_le_bytes());
                answer[48..48 + value.len()].copy_from_slice(value);
            }
            8 => answer[0..4].copy_from_slice(&u32::from_be_bytes(**name).to_le_bytes()),
            9 => {
                answer[28..32].copy_from_slice(&(value.len() as u32).to_le_bytes());
                answer[32..36].copy_from_slice(&u32::from_be_bytes(**kind).to_le_bytes());
            }
            other => panic!("command {other}"),
        }
        Some(answer)
    }
}

fn float(value: f32) -> Vec<u8> {
    value.to_le_bytes().to_vec()
}

#[test]
fn power_and_the_hottest_sensor_are_read() {
    let keys = vec![
        (b"#KEY", b"ui32", 7_u32.to_be_bytes().to_vec()),
        (b"PSTR", b"flt ", float(38.5)),
        (b"TaLP", b"flt ", float(120.0)),
        (b"Te05", b"flt ", float(51.25)),
        (b"Tg0f", b"flt ", float(f32::NAN)),
        (b"Tp01", b"sp78", 0x3d80_i16.to_be_bytes().to_vec()),
        (b"Tp02", b"flt ", float(-4000.0)),
    ];
    let mut controller = Controller::new(Memory(keys));
    assert_eq!(controller.temperatures.len(), 4);
    assert_eq!(controller.power(), Some(38.5));
    assert_eq!(controller.temperature(), Some(61.5));
}

#[test]
fn a_controller_that_says_nothing_is_none_the_worse() {
    struct Silent;
    impl Port for Silent {
        fn call(&mut self, _: &[u8; PACKET]) -> Option<[u8; PACKET]> {
            None
        }
    }
    let mut silent = Controller::new(Silent);
    assert_eq!((silent.power(), silent.temperature()), (None, None));
    let mut empty = Controller::new(Memory(Vec::new()));
    assert_eq!((empty.power(), empty.temperature()), (None, None));
    // A count beyond what there is, and a value of a kind that is not known.
    let odd = vec![(b"#KEY", b"ui32", vec![255; 4]), (b"PSTR", b"ch8*", vec![1; 4])];
    let mut odd = Controller::new(Memory(odd));
    assert_eq!((odd.power(), odd.temperature()), (None, None));
}
