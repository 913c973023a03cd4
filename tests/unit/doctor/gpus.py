"""What ``nvidia-smi`` prints, with the elements of drivers 555 to 580 that are read; two GPUs in good order."""

from __future__ import annotations

GPU = """
  <gpu id="00000000:{bus}:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <serial>165452300330{bus}</serial>
    <uuid>GPU-c5533cd4-5a60-059e-348d-b6d7466932{bus}</uuid>
    <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
    <gpu_reset_status><reset_required>No</reset_required></gpu_reset_status>
    <gpu_recovery_action>None</gpu_recovery_action>
    <pci>
      <pci_gpu_link_info>
        <pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>5</current_link_gen></pcie_gen>
        <link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width></link_widths>
      </pci_gpu_link_info>
    </pci>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_applications_clocks_setting>Not Active</clocks_event_reason_applications_clocks_setting>
      <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
      <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
      <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
      <clocks_event_reason_hw_power_brake_slowdown>Not Active</clocks_event_reason_hw_power_brake_slowdown>
      <clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
    </clocks_event_reasons>
    <fb_memory_usage><total>81559 MiB</total><used>1 MiB</used><free>81008 MiB</free></fb_memory_usage>
    <compute_mode>Default</compute_mode>
    <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
    <ecc_errors>
      <volatile>
        <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
        <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
        <dram_correctable>0</dram_correctable>
        <dram_uncorrectable>0</dram_uncorrectable>
      </volatile>
      <aggregate>
        <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
        <dram_uncorrectable>0</dram_uncorrectable><!-- ever -->
        <sram_threshold_exceeded>No</sram_threshold_exceeded>
      </aggregate>
      <channel_repair_pending>No</channel_repair_pending>
      <tpc_repair_pending>No</tpc_repair_pending>
    </ecc_errors>
    <retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
    <remapped_rows>
      <remapped_row_pending>No</remapped_row_pending>
      <remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
    <temperature>
      <gpu_temp>33 C</gpu_temp>
      <gpu_temp_tlimit>51 C</gpu_temp_tlimit>
      <gpu_temp_slow_tlimit_threshold>-2 C</gpu_temp_slow_tlimit_threshold>
    </temperature>
    <gpu_power_readings>
      <power_draw>70.12 W</power_draw>
      <current_power_limit>700.00 W</current_power_limit>
      <default_power_limit>700.00 W</default_power_limit>
    </gpu_power_readings>
    <clocks><sm_clock>1980 MHz</sm_clock></clocks>
    <max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks>
    <fabric><state>Completed</state><status>Success</status></fabric>
    <processes></processes>
  </gpu>
"""

REPORT = (
    '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
    "  <driver_version>570.86.15</driver_version>\n  <cuda_version>12.8</cuda_version>\n"
    f"  <attached_gpus>2</attached_gpus>{GPU.format(bus='18')}{GPU.format(bus='2a')}</nvidia_smi_log>\n"
)
"""``nvidia-smi -q -x``."""

OLD = (
    "<nvidia_smi_log><driver_version>470.1</driver_version><cuda_version>11.4</cuda_version><gpu>"
    "<product_name>Tesla V100</product_name><clocks_throttle_reasons><clocks_throttle_reason_hw_thermal_slowdown>Active"
    "</clocks_throttle_reason_hw_thermal_slowdown></clocks_throttle_reasons><temperature><gpu_temp>88 C</gpu_temp>"
    "<gpu_temp_slow_threshold>87 C</gpu_temp_slow_threshold></temperature><power_readings><power_draw>250.5 W"
    "</power_draw><power_limit>300.00 W</power_limit></power_readings></gpu></nvidia_smi_log>"
)
"""The same of an older driver, which has other names."""


def nvlink_status(*inactive: tuple[int, int], gpus: int = 2, links: int = 4) -> str:
    """Return the output of ``nvidia-smi nvlink -s``, with ``inactive`` links of GPUs."""
    lines = []
    for gpu in range(gpus):
        lines.append(f"GPU {gpu}: NVIDIA H100 80GB HBM3 (UUID: GPU-c5533cd4-5a60-059e-348d-b6d7466932e{gpu})")
        states = ("<inactive>" if (gpu, link) in inactive else "26.562 GB/s" for link in range(links))
        lines += [f"\t Link {link}: {state}" for link, state in enumerate(states)]
    return "\n".join(lines) + "\n"


NVLINK_ERRORS = (
    "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-c5533cd4-5a60-059e-348d-b6d7466932e0)\n"
    "\t Link 0: Replay Errors: 0\n\t Link 0: Recovery Errors: 0\n\t Link 0: CRC Errors: 0\n"
    "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-c5533cd4-5a60-059e-348d-b6d7466932e1)\n"
    "\t Link 0: Replay Errors: 3\n\t Link 0: Recovery Errors: 1\n\t Link 1: Replay Errors: 4\n"
)
"""``nvidia-smi nvlink -e``."""

KERNEL_LOG = (
    "[12.5] nvidia-nvlink: Nvlink Core is being initialized\n"
    "[99.1] NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
    "[99.2] NVRM: Xid (PCI:0000:2a:00): 13, pid=1234, name=python, Graphics Exception\n"
    "[99.3] NVRM: Xid (PCI:0000:2a:00): 13, pid=1234, name=python, Graphics Exception\n"
    "[99.4] NVRM: Xid (0000:2a:00): 999, unknown\n"
)
