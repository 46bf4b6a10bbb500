// Package cluster runs Watershed as Kubernetes workloads. A first Watershed with a real node hosts a second Watershed
// as pods, from the published images and manifests. Clients watch and write while its pods are scaled, deleted and
// upgraded. The package also swaps a cluster's kube-apiserver for Watershed and back, and scales the watch tier, under
// the same clients.
package cluster
