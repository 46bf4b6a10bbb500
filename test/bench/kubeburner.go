package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	"sigs.k8s.io/yaml"
)

// burnerNodes is the number of kwok's nodes that run kube-burner's pods.
const burnerNodes = 50

// burnerWorkloads are the measured examples of kube-burner. Each is a directory with a configuration of its name.
var burnerWorkloads = []string{"api-intensive", "crd-scale"}

// kubeBurner measures kube-burner's workloads on each kind of server, with kwok's nodes, kube-controller-manager and
// kube-scheduler. The servers run in sequence, because all share the processors. It replaces the table of a page.
func kubeBurner(dir string) {
	var names []string
	for _, k := range selected() {
		names = append(names, k.name)
	}
	results := newMeasured(names)
	for _, k := range selected() {
		c := k.startCluster(dir, burnerNodes)
		stop := c.startClients()
		c.join()
		for _, workload := range burnerWorkloads {
			before := c.cpu()
			rows := c.burn(workload)
			settle([]*server{c.server})
			rows[workload+": the server's CPU (s)"] = c.cpu() - before
			rows[workload+": the server's memory after it (MB)"] = c.memory()
			for row, value := range rows {
				results.record(row, c.name, value, nil)
			}
		}
		stop()
		c.stop()
	}
	table := results.markdown(fmt.Sprintf("%s, %d nodes, %d requests a second at most:",
		machine(), burnerNodes, *burnerRate))
	fmt.Println(table)
	if *only == "" || *page {
		check(writeBetween(filepath.Join(filepath.Dir(*out), "kube-burner.md"), begin, end, table))
	}
}

// burn runs a workload. It returns the seconds of each job, and the number of errors in the log.
func (c *cluster) burn(workload string) map[string]float64 {
	dir := filepath.Join(c.dir, workload)
	check(os.CopyFS(dir, os.DirFS(filepath.Join(*bin, "kube-burner-workloads", workload))))
	file := filepath.Join(dir, workload+".yml")
	b, err := os.ReadFile(file)
	check(err)
	b, err = burnerConfig(b)
	check(err)
	check(os.WriteFile(file, b, 0o600))
	cmd, output := run(dir, "kube-burner", absolute(filepath.Join(*bin, "kube-burner")), "init", "--config", file,
		"--kubeconfig", c.kubeconfig, "--skip-log-file")
	if err := cmd.Wait(); err != nil {
		b, _ := os.ReadFile(output)
		log.Fatalf("%s: kube-burner's %s: %v\n%s", c.name, workload, err, b)
	}
	var jobs []struct {
		Timestamp    time.Time
		EndTimestamp time.Time
		JobConfig    struct{ Name string }
	}
	b, err = os.ReadFile(filepath.Join(dir, "metrics", "jobSummary.json"))
	check(err)
	check(json.Unmarshal(b, &jobs))
	rows := map[string]float64{}
	for i, j := range jobs {
		row := fmt.Sprintf("%s: job %d, %s (s)", workload, i+1, j.JobConfig.Name)
		rows[row] = j.EndTimestamp.Sub(j.Timestamp).Seconds()
	}
	b, err = os.ReadFile(output)
	check(err)
	failed := 0
	for line := range bytes.Lines(b) {
		// A pod that kube-burner removes may be gone already.
		gone := bytes.Contains(line, []byte("Error found removing")) && bytes.Contains(line, []byte("not found"))
		if bytes.Contains(line, []byte("level=error")) && !gone {
			failed++
		}
	}
	rows[workload+": errors"] = float64(failed)
	return rows
}

// burnerConfig returns a workload's configuration with -kube-burner's rate, and with results in files instead of a
// database. The latencies of pods are not measured: they need events of a kubelet, which kwok's nodes do not have.
func burnerConfig(b []byte) ([]byte, error) {
	var config map[string]any
	if err := yaml.Unmarshal(b, &config); err != nil {
		return nil, err
	}
	config["metricsEndpoints"] = []any{map[string]any{
		"indexer": map[string]any{"type": "local", "metricsDirectory": "metrics"},
	}}
	if global, ok := config["global"].(map[string]any); ok {
		delete(global, "measurements")
	}
	jobs, _ := config["jobs"].([]any)
	for _, j := range jobs {
		if job, ok := j.(map[string]any); ok {
			job["qps"], job["burst"] = *burnerRate, *burnerRate
		}
	}
	return yaml.Marshal(config)
}
