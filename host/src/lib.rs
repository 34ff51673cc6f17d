pub mod device_limits;
pub mod driver;
