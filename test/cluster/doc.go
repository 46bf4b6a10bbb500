// Package cluster runs Watershed as Kubernetes workloads: a first Watershed with a real node hosts a second one as
// pods, from the images and manifests that users get, and clients watch and write while its pods are scaled, deleted
// and upgraded. Beside that it swaps a cluster's kube-apiserver for Watershed and back, and scales the watch tier,
// under the same clients.
package cluster
