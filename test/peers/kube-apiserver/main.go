// Command kube-apiserver is Kubernetes' own, built from its module: a real peer for the tests.
package main

import (
	"os"
	_ "time/tzdata" // CronJobs with a time zone

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() { os.Exit(cli.Run(app.NewAPIServerCommand())) }
