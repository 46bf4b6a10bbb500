package capacity

import (
	"bytes"
	_ "embed"
	"encoding/json"
)

// Names of the operations, objects and watches in measured.json.
const (
	Lease         = "update a Lease"
	ConfigMap     = "create a ConfigMap"
	Pod           = "create a Pod"
	DeliverShared = "deliver to a watch shared"
	DeliverOwn    = "deliver to a watch of its own"
	List          = "list a megabyte"
	HoldShared    = "hold a watch shared" // for a second
	HoldOwn       = "hold a watch of its own"
	Pod76         = "Pod of 7.6 KB"
	ConfigMap1    = "ConfigMap of 1 KB"
	Shared        = "shared"
	Own           = "of its own"
)

// measuredReplicas is the number of watchfanout replicas of the measurement.
const measuredReplicas = 2

// Measured are the costs of `split` by service.
type Measured struct {
	Date       string `json:"date"`
	Processors int    `json:"processors"`
	Go         string `json:"go"`
	// CPU is the processor time of an operation in microseconds.
	CPU map[string]map[string]float64 `json:"cpu"`
	// Publisher is the processor time of publishing an event in microseconds, a part of the registry's.
	Publisher float64 `json:"publisher"`
	// Process is the memory of an idle process in megabytes, and Idle its use of a core.
	Process map[string]float64 `json:"process"`
	Idle    map[string]float64 `json:"idle"`
	// Object is the memory of an object in each process in kilobytes.
	Object map[string]map[string]float64 `json:"object"`
	// Watch is the memory of a watch in all processes of a service in kilobytes.
	Watch map[string]map[string]float64 `json:"watch"`
}

//go:embed measured.json
var document []byte

// measured returns the costs of measured.json.
func measured() (*Measured, error) {
	m := &Measured{}
	d := json.NewDecoder(bytes.NewReader(document))
	d.DisallowUnknownFields()
	return m, d.Decode(m)
}
